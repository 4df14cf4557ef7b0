"""What `mutate.py` breaks and which tests must see it: rooms with their tests, and faults that were planted by hand."""

from collections.abc import Mapping

WARM = ("torch", "transformers", "transformers.models.llama.modeling_llama", "hypothesis", "pydantic", "typer.testing")
"""What is loaded once, before the first fork; nothing of the package."""

_METHODS = (
    "tests/recipes/test_limits.py",
    "tests/recipes/test_length.py",
    "tests/recipes/test_reference.py::test_our_own_frequencies_equal_the_papers",
    "tests/recipes/test_divided.py::test_lists_equal_the_reference",
    "tests/converters/test_other_files.py",
    "tests/search/test_space.py",
    "tests/test_reading.py",
)
_RELATION = (
    "tests/search/test_space.py",
    "tests/recipes/test_compositions.py",
    "tests/recipes/test_dual_chunk.py",
    "tests/portable/test_relation.py",
)
_CODE = (
    "tests/recipes/test_limits.py",
    "tests/recipes/test_compositions.py",
    "tests/search/test_space.py",
    "tests/test_older_versions.py",
    "tests/portable/test_golden.py",
)
_READING = (
    "tests/test_reading.py",
    "tests/converters/test_convert.py",
)
_SCORING = (
    "tests/evaluate/test_scoring.py",
    "tests/evaluate/test_loss.py",
    "tests/evaluate/test_scored_is_written.py::test_scored_is_written[yarn]",
    "tests/evaluate/test_scored_is_written.py::test_scored_is_written[mspoe linear prompt]",
)
_LOSSES = ("tests/finetune/test_chunked_loss.py",)
_MERGE = ("tests/finetune/test_merge_kinds.py", "tests/finetune/test_merge.py")

_PLAIN = ("abf", "base", "divided", "dynamic", "frequencies", "length", "llama3", "longrope", "methods", "ntk", "param")
_PLAIN += ("pi", "recipe", "rotary", "yarn")

ROOMS: Mapping[str, tuple[str, ...]] = {
    **{f"recipes/{name}.py": _METHODS for name in _PLAIN},
    **{f"recipes/{name}.py": _RELATION for name in ("relation", "adaptive", "dual_chunk")},
    **{f"recipes/{name}.py": _CODE for name in ("mspoe", "code", "code_layout", "own_code", "legacy")},
    "checkpoint.py": _READING,
    "geometry.py": _READING,
    "reading/*.py": _READING,
    "evaluate/scoring/*.py": _SCORING,
    "finetune/loss.py": _LOSSES,
    "finetune/merge.py": _MERGE,
    "finetune/rewrite.py": _MERGE,
    "finetune/tensors.py": _MERGE,
    "finetune/adapter_config.py": _MERGE,
}
"""The pure rooms: files of the package, and the quick tests that stand for them."""

_OTHER_FILES = ("tests/converters/test_other_files.py",)
_FORMULAS = ("tests/recipes/test_limits.py",)
_HEADS = (
    "tests/portable/test_schedules.py",
    "tests/portable/test_recurrent_layers.py",
    "tests/portable/test_generation.py",
)
_CALIBRATION = ("tests/converters/test_calibration.py",)
_SEARCH = ("tests/search/test_bounds.py",)
_TOKENS = ("tests/test_tokens.py",)
_TERMINAL = ("tests/cli/test_terminal.py",)

PLANTED: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("recipes/ntk.py", "(rotary.span / (rotary.dim - 2))", "(rotary.dim / (rotary.dim - 2))", _FORMULAS),
    ("recipes/rotary.py", '    text.pop("original_max_position_embeddings", None)\n', "", _OTHER_FILES),
    ("recipes/llama3.py", "self.high_freq_factor <= self", "self.high_freq_factor < self", _OTHER_FILES),
    ("recipes/base.py", "self.target_length <= rotary", "self.target_length < rotary", _OTHER_FILES),
    ("recipes/param.py", "if wanted is int and value != int(value):", "if False:", _FORMULAS),
    ("recipes/frequencies.py", ", dim - 1)", ", dim)", _FORMULAS),
    ("portable/mspoe.py", "min(math.ceil(last), 2 * size - 1)", "math.ceil(last)", _HEADS),
    ("portable/method.py", ' + inputs.get("cycle_offset", 0)', "", _HEADS),
    ("converters/plan.py", "return text if count == 1 else", "return text if count else", _OTHER_FILES),
    ("portable/mspoe.py", "call.mask, call.scaling)", "None, call.scaling)", _HEADS),
    ("portable/mspoe.py", "call.mask, call.scaling)", "call.mask)", _CALIBRATION),
    ("converters/calibration.py", 'if variant == "paper" else', "if variant else", _CALIBRATION),
    ("verify/logits.py", "_TOLERANCE = 1e-4", "_TOLERANCE = 0.1", ("tests/converters/test_verification.py",)),
    ("verify/loading_checks.py", "_TOLERANCE = 2e-5", "_TOLERANCE = 0.1", ("tests/publish/test_verify.py",)),
    ("converters/plan.py", ' and generation.get("max_length") == before.context_length', "", _OTHER_FILES),
    ("search/pareto.py", "rise, rise + half", "rise, rise - half", _SEARCH),
    ("search/final_evaluation.py", "return rise + half >", "return rise - half >", _SEARCH),
    ("tokens.py", 'return _LOOKS_LIKE_ONE.sub(r"\\1…", text)', "return text", _TOKENS),
    ("cli/terminal.py", "return redacted(_UNSEEN.sub(", "return (_UNSEEN.sub(", _TERMINAL),
    ("cli/output.py", "text = redacted(json.dumps(", "text = (json.dumps(", _TERMINAL),
    ("cli/app.py", "sys.stderr.write(redacted(", "sys.stderr.write((", _TOKENS),
)
"""File, what stands there once, what to put in its place, and the tests that must fail then."""
