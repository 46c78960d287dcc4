"""tests/sass.py on a listing as cuobjdump prints it."""
from __future__ import annotations

import pytest

from tests import sass

LISTING = '''
\t\tFunction : _ZN3fa314forward_kernelINS_17FwdBf16D128CausalEEEvNS_15FwdDeviceParamsE
        /*0000*/                   LDC R1, c[0x0][0x28] ;            /* 0x00000a00ff017b82 */
                                                                     /* 0x000fe20000000800 */
        /*0010*/                   ULDC.64 UR30, c[0x0][0x198] ;     /* 0x0000660000047ab9 */
        /*0020*/                   UIADD3 UR8, UP0, UR30, 0xf0, URZ ; /* 0x000000f01e087890 */
        /*0030*/                   ULDC UR9, c[0x0][UR16+0x210] ;    /* 0x0000840010097abb */
        /*0040*/                   LDC.64 R4, c[0x0][0x498] ;        /* 0x00012600ff047b82 */
        /*0050*/              @!P0 BRA 0x12b0 ;                      /* 0x0000001000700947 */
        /*0060*/                   BSSY B0, 0x12c0 ;                 /* 0x0000120000007945 */
        /*0070*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ; /* 0x0 */
        /*0080*/                   IADD3 R15, R15, -0x1, RZ ;        /* 0xffffffff0f0f7810 */
        /*0090*/                   BRA 0x90;                         /* 0xfffffffc00fc7947 */
        /*00a0*/                   NOP;                              /* 0x0000000000007918 */
'''
SAME = (('c[0x0][0x498]', 'c[0x0][0x4a8]'), ('UR16+0x210', 'UR16+0x230'),
        ('0x12b0', '0x1350'), ('0x12c0', '0x1360'), ('15FwdDeviceParams', '9FwdParams'),
        ('_ZN3fa314', '_ZN3fa340_GLOBAL__N__69f51426_8_sinks_cu_e1022e5114'))


def kernels(listing: str = LISTING, old: str = '', new: str = '') -> dict[str, sass.Kernel]:
    assert old in listing
    parsed = sass.parse(listing.replace(old, new) if old else listing)
    return {sass.key_of(name): sass.kernel_of(code) for name, code in parsed.items()}


@pytest.mark.parametrize('old, new', SAME)
def test_parameters_labels_and_names_are_masked(old, new):
    assert sass.compare(kernels(), kernels(old=old, new=new)) == {'equal': 1}


@pytest.mark.parametrize('old, new', [('0x28]', '0x2c]'), ('0xf0', '0x100'), ('-0x1', '0x1')])
def test_other_immediates_are_shown(old, new, capsys):
    assert sass.compare(kernels(), kernels(old=old, new=new)) == {'constants': 1}
    assert '(1 times)' in capsys.readouterr().out


@pytest.mark.parametrize('old, new, says', [
    ('R4, c[0x0][0x498]', 'R6, c[0x0][0x498]', '9 instructions, in another order or registers'),
    ('[UR16+', '[UR17+', 'in another order'), ('@!P0', '@P0', 'in another order'),
    ('BF16', 'F16', 'HGMMA.64x128x16.F32.BF16 -1'), ('128x16', '192x16', ' +1'),
    ('IADD3 R15, R15, -0x1, RZ', 'NOP ; /* */\n/*0081*/ NOP', '9 -> 8 instructions')])
def test_opcodes_and_registers_count(old, new, says, capsys):
    assert sass.compare(kernels(), kernels(old=old, new=new)) == {'changed': 1}
    assert says in capsys.readouterr().out


def test_missing_and_new_kernels():
    renamed = kernels(old='17FwdBf16D128Causal', new='17FwdBf16D256Causal')
    assert list(renamed) == ['forward_kernel:FwdBf16D256Causal']
    assert sass.compare(kernels(), renamed) == {'missing': 1, 'new': 1}


def test_names():
    assert sass.key_of('_ZN3fa344_GLOBAL__N__9b4a7e22_11_exchange_cu_5e28776715exchange_kernelIN7'
                       'cutlass10bfloat16_tELi256EEEvNS_14QuantizeParamsE') == (
        'exchange_kernel<N7cutlass10bfloat16_tELi256E>')
    assert sass.key_of('_ZN3fa312clear_kernelEPji') == 'clear_kernel'


def test_a_json_file_holds_what_compare_needs(tmp_path):
    sass.save(kernels(), tmp_path / 'old.json')
    old = sass.load(tmp_path / 'old.json')
    assert sass.compare(old, kernels()) == {'equal': 1}
    assert sass.compare(old, kernels(old='BF16', new='F16')) == {'changed': 1}
    assert sass.compare(old, kernels(old='0xf0', new='0x100')) == {'constants': 1}
