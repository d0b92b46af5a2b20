"""The Llama of `transformers` with the same weights: full pass, and cached decoding of left-padded rows."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from robotattn.attention import Transformer, TransformerConfig
from robotattn.attention.masks import Causal

VOCABULARY = 40


@pytest.fixture(scope="module", name="pair")
def both():
    """Return Llama and our stack with its weights: RoPE, RMSNorm, SwiGLU, 4 query heads on 2 key heads."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        pad_token_id=0,
        initializer_range=0.3,
        attn_implementation="eager",
    )
    theirs = LlamaForCausalLM(config).eval().requires_grad_(False)
    ours = Transformer(
        TransformerConfig(
            3,
            32,
            4,
            48,
            kv_heads=2,
            norm_kind="rms",
            norm_eps=1e-6,
            activation="swiglu",
            bias=False,
            position="rotary",
        )
    )
    state = {"norm.weight": theirs.model.norm.weight}
    for i, layer in enumerate(theirs.model.layers):
        parts = {
            "attention.query": layer.self_attn.q_proj,
            "attention.key": layer.self_attn.k_proj,
            "attention.value": layer.self_attn.v_proj,
            "attention.out": layer.self_attn.o_proj,
            "feedforward.gate": layer.mlp.gate_proj,
            "feedforward.up": layer.mlp.up_proj,
            "feedforward.down": layer.mlp.down_proj,
            "attention_norm": layer.input_layernorm,
            "feedforward_norm": layer.post_attention_layernorm,
        }
        state |= {f"layers.{i}.{name}.weight": module.weight for name, module in parts.items()}
    ours.load_state_dict(state)
    return ours.eval().requires_grad_(False), theirs


def ids(*lengths):
    """Left-padded random tokens of the given lengths, and which are real."""
    longest = max(lengths)
    drawn = torch.randint(1, VOCABULARY, (len(lengths), longest), generator=torch.Generator().manual_seed(0))
    valid = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    return drawn * valid, valid


def logits(ours, theirs, tokens, **how):
    return theirs.lm_head(ours(theirs.model.embed_tokens(tokens), Causal(), **how))


def test_the_full_pass_equals_llama(pair):
    ours, theirs = pair
    tokens, _ = ids(9, 9)
    torch.testing.assert_close(logits(ours, theirs, tokens), theirs(tokens).logits, rtol=0, atol=1e-5)


def test_left_padded_rows_equal_llama(pair):
    ours, theirs = pair
    tokens, valid = ids(9, 4, 2)
    places = (valid.cumsum(1) - 1).clamp(min=0)
    want = theirs(tokens, attention_mask=valid.long(), position_ids=places).logits
    torch.testing.assert_close(logits(ours, theirs, tokens, valid=valid)[valid], want[valid], rtol=0, atol=1e-5)


@pytest.mark.parametrize("lengths", [(6, 6), (6, 3, 1)])
def test_cached_greedy_decoding_of_padded_rows_equals_llama_generate(pair, lengths):
    ours, theirs = pair
    tokens, valid = ids(*lengths)
    want = theirs.generate(
        tokens,
        attention_mask=valid.long(),
        max_new_tokens=10,
        do_sample=False,
        use_cache=True,
        output_logits=True,
        return_dict_in_generate=True,
        eos_token_id=None,
    )
    cache, last, drawn = ours.cache(len(tokens), tokens.shape[1] + 10), tokens, []
    for step in range(10):
        scores = logits(ours, theirs, last, cache=cache, valid=valid if step == 0 else None)[:, -1]
        torch.testing.assert_close(scores, want.logits[step], rtol=0, atol=1e-5)
        last = scores.argmax(-1, keepdim=True)
        drawn.append(last)
    assert torch.equal(torch.cat(drawn, dim=1), want.sequences[:, tokens.shape[1] :])


def test_in_float64_the_full_pass_equals_llama_within_the_rounding_of_its_angles(pair):
    """Llama computes angles in float32 whatever its weights are; ours are exact, so 1e-12 is out of reach here."""
    ours, theirs = (net.double() for net in pair)
    try:
        tokens, _ = ids(9, 9)
        torch.testing.assert_close(logits(ours, theirs, tokens), theirs(tokens).logits, rtol=0, atol=1e-5)
    finally:
        ours.float(), theirs.float()
