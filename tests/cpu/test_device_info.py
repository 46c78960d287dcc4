"""What a user hears when the driver or the GPU cannot run the kernels, and which tensors TMA can
address.
"""
import pytest

from tests.host import _host

CUDA_13 = 13000


@pytest.mark.parametrize('driver', [13000, 13020, 14000])
def test_drivers_of_the_same_major_and_later_will_do(driver):
    assert _host.driver_problem(driver, CUDA_13) == ''
    assert _host.driver_problem(driver, 13020) == ''


def test_old_driver():
    assert _host.driver_problem(12080, CUDA_13) == (
        'flash_attn3.device: expected an NVIDIA driver for CUDA 13.0 or later (series 580), '
        'got a driver for CUDA 12.8; '
        'hint: update the driver (nvidia-smi shows its version), '
        'or build flash_attn3 with an older CUDA')


def test_without_a_driver_there_is_nothing_to_say():
    assert _host.driver_problem(0, CUDA_13) == ''


def test_cuda_12_needs_an_older_driver():
    assert _host.driver_problem(12020, 12080) == ''
    text = _host.driver_problem(11080, 12080)
    assert 'CUDA 12.0 or later (series 525), got a driver for CUDA 11.8' in text


def test_capability():
    assert _host.capability_problem(0, 9, 0) == ''
    assert _host.capability_problem(1, 8, 0) == (
        'flash_attn3.device: expected a GPU of compute capability 9.0 (Hopper: H100, H200, GH200), '
        'got cuda:1 of capability 8.0; '
        "hint: flash_attn3.flash_attn_func runs PyTorch's attention there")
    for newer in ((10, 0), (12, 0), (9, 1)):
        assert _host.capability_problem(0, *newer), 'sm_90a code runs on 9.0 alone'


SIZES = (2, 100, 8, 64)
CONTIGUOUS = (51200, 512, 64, 1)


@pytest.mark.parametrize('sizes, strides, address, can', [
    (SIZES, CONTIGUOUS, 0, True),
    (SIZES, CONTIGUOUS, 16, True),
    (SIZES, CONTIGUOUS, 8, False),
    (SIZES, CONTIGUOUS, 2, False),
    (SIZES, (64, 1024, 128, 1), 0, True),
    (SIZES, (51200, 512, 8, 1), 0, True),
    (SIZES, (51200, 512, 68, 1), 0, False),
    (SIZES, (51200, 516, 64, 1), 0, False),
    (SIZES, (51204, 512, 64, 1), 0, False),
    (SIZES, (0, 512, 64, 1), 0, True),
    (SIZES, (2**39, 512, 64, 1), 0, False),
    (SIZES, (2**39 - 8, 512, 64, 1), 0, True),
    ((1, 1, 1, 64), (3, 5, 7, 1), 0, True),
    ((1, 100, 1, 64), (2**50, 64, 1, 1), 0, True)])
def test_what_tma_can_address(sizes, strides, address, can):
    """16-bit elements, and e4m3 with twice the strides; base and strides in multiples of 16 bytes,
    strides below 2^40 bytes.

    A dimension of size 1 has no stride.
    """
    assert _host.tma_can_address(sizes, strides, address, False) is can
    bytes_of = [size if dim == 3 else 2 * size for dim, size in enumerate(strides)]
    assert _host.tma_can_address(sizes, bytes_of, address, True) is can
