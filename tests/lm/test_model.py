"""The language model: each part against its formula, causality, and weights that depend on (config, seed) alone."""
from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from mok.lm.linear import linear
from mok.lm.model import CONFIGS, LanguageModel, ModelConfig, RMSNorm, apply_rope, config_by_name, generate, rope_tables, sequence_losses

TINY = CONFIGS["tiny"]


def test_rms_norm_is_its_formula():
    norm = RMSNorm(7, eps=1e-3)
    norm.weight.data.copy_(torch.arange(7.0))
    x = torch.randn(3, 7)
    expected = [[v / math.sqrt(sum(u * u for u in row) / 7 + 1e-3) * i for i, v in enumerate(row)] for row in x.tolist()]
    torch.testing.assert_close(norm(x), torch.tensor(expected))


def test_rope_scores_depend_on_distance_alone():
    cos, sin = rope_tables(64, 8, theta=100.0)
    q, k = torch.randn(1, 1, 1, 8).expand(1, 1, 64, 8), torch.randn(1, 1, 1, 8).expand(1, 1, 64, 8)
    scores = (apply_rope(q, cos, sin) @ apply_rope(k, cos, sin).transpose(-1, -2))[0, 0]
    for distance in (0, 1, 17):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    assert (scores[:, 0] - scores[0, 0]).abs().max() > 0.1                    # and do depend on it
    assert torch.equal(apply_rope(q, cos, sin)[..., 0, :], q[..., 0, :])      # position 0 is not rotated


@pytest.mark.parametrize("config", [TINY, replace(TINY, head_size=12)])       # heads that together are wider than the hidden size
def test_attention_is_grouped_query_attention_spelled_out(config: ModelConfig):
    model = LanguageModel(config, seed=3)
    attention, x = model.blocks[0].attention, torch.randn(2, 9, TINY.hidden_size)
    d, kv = config.head_dim, TINY.num_kv_heads
    qkv = (x @ attention.qkv.weight.T).view(2, 9, -1, d)
    expected = torch.zeros(2, 9, TINY.num_heads, d)
    for b in range(2):
        for head in range(TINY.num_heads):
            group = TINY.num_heads + head // (TINY.num_heads // kv)
            q, k, v = qkv[b, :, head], qkv[b, :, group], qkv[b, :, group + kv]
            q, k = (apply_rope(t[None, None], model.cos[:9], model.sin[:9])[0, 0] for t in (q, k))
            for t in range(9):
                weights = torch.softmax(k[:t + 1] @ q[t] / math.sqrt(d), 0)
                expected[b, t, head] = weights @ v[:t + 1]
    torch.testing.assert_close(attention(x, model.cos, model.sin), expected.view(2, 9, -1) @ attention.out.weight.T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", [TINY, replace(TINY, tie_embeddings=True, shared_intermediate_sizes=(16,))])
def test_a_position_sees_nothing_after_it_and_everything_before(config: ModelConfig):
    model = LanguageModel(config, seed=1).eval()
    tokens = torch.randint(256, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    with torch.no_grad():
        before, after = model(tokens)[0], model(changed)[0]
    assert torch.equal(before[:7], after[:7])
    assert all(not torch.equal(before[t], after[t]) for t in range(7, 12))


def test_weights_depend_on_config_and_seed_alone_and_start_near_a_uniform_guess():
    torch.manual_seed(1)
    a = LanguageModel(TINY, seed=5).state_dict()
    torch.manual_seed(2)
    b, c = LanguageModel(TINY, seed=5), LanguageModel(TINY, seed=6).state_dict()
    assert all(torch.equal(a[name], value) for name, value in b.state_dict().items())
    assert sum(not torch.equal(a[name], c[name]) for name in a) >= 4 * TINY.num_layers      # all but the norms
    assert not torch.equal(a["blocks.0.moe.w_down"], a["blocks.1.moe.w_down"])
    tokens = torch.randint(256, (4, 33))
    loss = sequence_losses(b(tokens[:, :-1]), tokens[:, 1:]).sum().item() / (4 * 32)
    assert abs(loss - math.log(256)) < 0.2


def test_sequence_losses_are_negative_log_softmax():
    logits, targets = torch.randn(2, 3, 256), torch.tensor([[5, 0, 255], [1, 1, 2]])
    expected = [-sum(torch.log_softmax(logits[b, t].double(), 0)[targets[b, t]].item() for t in range(3)) for b in range(2)]
    assert sequence_losses(logits, targets).tolist() == pytest.approx(expected, rel=1e-5)


def test_generate_repeats_with_its_seed_and_goes_beyond_the_context():
    model = LanguageModel(TINY, seed=0).eval()
    calls = []
    prompt = b"def forward(self, x): return x"                                         # 30 bytes, the context has 32
    first = generate(model, prompt, 6, seed=1, on_byte=lambda: calls.append(1))
    assert len(first) == 6 and len(calls) == 6
    assert generate(model, prompt, 6, seed=1) == first != generate(model, prompt, 6, seed=2)
    with pytest.raises(ValueError, match=r"prompt=b''"):
        generate(model, b"", 1)


def test_bad_sizes_and_names_are_named():
    with pytest.raises(ValueError, match=r"tokens has 33 positions and must have at most seq_len=32"):
        LanguageModel(TINY)(torch.zeros(1, 33, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"hidden_size=30 must be an even multiple of num_heads=4"):
        replace(TINY, hidden_size=30)
    with pytest.raises(ValueError, match=r"num_heads=4 must be a multiple of num_kv_heads=3"):
        replace(TINY, num_kv_heads=3)
    with pytest.raises(ValueError, match=r"head_size=3 must be a positive even number"):
        replace(TINY, head_size=3)
    with pytest.raises(ValueError, match=r"config='huge' must be one of tiny, small, 1b"):
        config_by_name("huge")
    with pytest.raises(ValueError, match=r"moe_impl='magic' must be one of engine, reference"):
        LanguageModel(TINY, moe_impl="magic")


@pytest.mark.parametrize(("precision", "seq_len"), [(torch.float32, 7), (torch.float32, 64), (torch.bfloat16, 64)])
def test_a_sequences_loss_has_the_same_bits_in_any_batch_and_with_any_number_of_threads(precision, seq_len):
    """What makes a loss independent of the number of ranks. 7 rows: there a plain library product changes bits with threads on an AMD Zen 5."""
    model = LanguageModel(replace(CONFIGS["small"], num_layers=1), seed=0)
    windows = torch.randint(256, (5, seq_len + 1))
    before = torch.get_num_threads()

    def losses(part):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
            return sequence_losses(model(part[:, :-1]), part[:, 1:])

    try:
        whole = losses(windows)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert torch.equal(losses(windows), whole), threads
            assert torch.equal(torch.cat([losses(part) for part in windows.split([1, 3, 1])]), whole), threads
    finally:
        torch.set_num_threads(before)


def test_linear_is_a_plain_product_with_its_gradients():
    x, weight, dy = torch.randn(3, 5, 7, requires_grad=True), torch.randn(4, 7, requires_grad=True), torch.randn(3, 5, 4)
    got = torch.autograd.grad(linear(x, weight), [x, weight], dy)
    expected = torch.autograd.grad(x @ weight.T, [x, weight], dy)
    torch.testing.assert_close(linear(x, weight), x @ weight.T)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x, weight)
    assert y.dtype == torch.bfloat16
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(y, [x, weight], dy.bfloat16()))
