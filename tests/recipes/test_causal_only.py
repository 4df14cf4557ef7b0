"""Decoders that config.json makes bidirectional: methods that change attention refuse them with the true reason."""

import pytest

from ctxext.checkpoint.families import family_of
from ctxext.recipes.registry import method_named


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, '"use_bidirectional_attention": true'),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, '"use_bidirectional_attention": true'),
        ({"model_type": "gemma4_text", "use_bidirectional_attention": "all"}, '"use_bidirectional_attention": "all"'),
        ({"model_type": "gemma3", "text_config": {"use_bidirectional_attention": True}}, "use_bidirectional_attention"),
        ({"model_type": "paligemma", "text_config": {"model_type": "gemma"}}, "use_bidirectional_attention"),
        ({"model_type": "llama", "is_causal": False}, '"is_causal": false'),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": False}, ""),
        ({"model_type": "gemma4_text", "use_bidirectional_attention": "vision"}, ""),
        ({"model_type": "llama", "use_bidirectional_attention": True}, ""),
    ],
)
@pytest.mark.parametrize("name", ["self-extend", "adaptive", "sinks", "distance-aware"])
def test_bidirectional_decoders_are_refused_with_the_key_that_makes_them_so(config, said, name):
    reason = method_named(name).refusal(config, family_of(config))
    assert said in reason
    assert ("is for causal attention" in reason) == bool(said)
