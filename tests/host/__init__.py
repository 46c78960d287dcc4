"""_host: a module in C++ that shows the kernels' own arithmetic; build_tools/build_host.py."""
