"""Hugging Face's `kernels` with LOCAL_KERNELS: transformers asks it for a kernel of its hub, and is
given this package. A tiny random gpt-oss in float32 on the CPU, against eager attention.
`make test-clients` has `kernels`.
"""
import os
import subprocess
import sys

import pytest
import torch

from flash_attn3.integrations import transformers as integration

from tests.support.called_ops import CalledOps

pytest.importorskip('transformers', reason='the contract is with transformers')
from transformers.utils import import_utils  # noqa: E402

from tests.support import client_models  # noqa: E402

LENGTH, FA3 = 21, client_models.FA3
PRINTED = f'{integration.KERNEL}={integration.local_kernel_dir()}'


@pytest.fixture
def model(monkeypatch):
    """gpt-oss; what transformers registers for the kernel is gone after the test."""
    pytest.importorskip('kernels', reason='the contract is with kernels')
    if not import_utils.is_kernels_available():
        pytest.skip('transformers wants another version of kernels')
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface
    for interface in (AttentionInterface, AttentionMaskInterface):
        monkeypatch.setattr(interface, '_global_mapping', dict(interface._global_mapping))
    monkeypatch.setattr(client_models.utilities, '_loaded_implementation', None)
    monkeypatch.setenv('LOCAL_KERNELS', PRINTED)
    with client_models.gpu_claimed():
        yield client_models.model_of('gpt_oss')


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize('side', ['none', 'left', 'right'])
@pytest.mark.parametrize('name', [integration.KERNEL, FA3])
def test_logits_and_gradients(model, name, side):
    """Sinks and windows included. transformers makes flash_attention_3 the kernel for this model,
    without upstream's names in the process.
    """
    ids = client_models.tokens(3, LENGTH)
    mask = client_models.padding(side, LENGTH, (9, 0, 4))

    def results():
        model.zero_grad()
        logits = model(ids, attention_mask=mask).logits[mask.bool()]
        logits.log_softmax(-1)[:, 3].mean().neg().backward()
        return dict(logits=logits.detach()) | {
            key: x.grad.clone() for key, x in model.named_parameters() if x.grad is not None}
    expected = results()
    model.set_attn_implementation(name)
    assert model.config._attn_implementation == integration.KERNEL
    assert 'flash_attn_interface' not in sys.modules
    with CalledOps() as ops:
        got = results()
    layers = model.config.num_hidden_layers
    for word in ('fwd', 'bwd'):
        assert sum(word in op for op in ops.names) == layers, ops.names
    assert got.keys() == expected.keys()
    assert sum(key.endswith('sinks') and bool((x != 0).all()) for key, x in got.items()) == layers
    for key, x in got.items():
        close(x, expected[key])


def test_generate(model):
    """Greedy, a batch padded on the left, past the window: the same tokens."""
    mask = client_models.padding('left', LENGTH, (9, 0, 4))
    call = dict(inputs=client_models.tokens(3, LENGTH) * mask, attention_mask=mask,
                max_new_tokens=10, do_sample=False, disable_compile=True)
    expected = model.generate(**call)
    model.set_attn_implementation(integration.KERNEL)
    with CalledOps() as ops:
        got = model.generate(**call)
    assert len(ops.names) == 10 * model.config.num_hidden_layers
    assert got.shape == (3, LENGTH + 10) and torch.equal(got, expected)


def test_the_value_that_is_printed():
    """Nothing else is printed, and neither the shim nor transformers is imported for it."""
    done = subprocess.run([sys.executable, '-m', 'flash_attn3.integrations.transformers'],
                          capture_output=True, text=True, check=True)
    assert done.stdout == PRINTED + '\n' and os.path.isdir(PRINTED.partition('=')[2])
    code = ('import sys\nimport flash_attn3.integrations.transformers as integration\n'
            'integration.local_kernel_dir()\n'
            'assert not {"transformers", "flash_attn_interface", "kernels"} & set(sys.modules)')
    subprocess.run([sys.executable, '-c', code], check=True)


def test_a_path_that_cannot_be_told_is_refused(monkeypatch):
    monkeypatch.setattr(integration, '__file__', '/a:b/flash_attn3/integrations/transformers.py')
    with pytest.raises(RuntimeError, match="expected a path without ':', got /a:b/.*; hint: LOCAL"):
        integration.local_kernel_dir()
