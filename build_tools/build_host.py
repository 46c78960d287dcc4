"""Builds tests/host/_host.*.so in place: the pybind11 module through which the tests reach
csrc/core and CuTe's layouts. g++ alone; not part of the wheel.
"""
import platform
import sys
import sysconfig
from pathlib import Path

import pybind11

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from build_tools import native, toolchain, units  # noqa: E402


def main() -> None:
    native.generate_instances()
    includes = [Path(pybind11.get_include()), toolchain.python_include()]
    versions = [pybind11.__version__, platform.python_version()]
    module = native.host_unit(includes, versions)
    objects = units.compile_units([module, *native.plain_units()])
    name = '_host' + sysconfig.get_config_var('EXT_SUFFIX')
    native.link(list(objects.values()), [], units.ROOT / 'tests' / 'host' / name)


if __name__ == '__main__':
    try:
        main()
    except toolchain.BuildError as error:
        sys.exit(str(error))
