"""What `mutate.py` breaks and which tests must see it: rooms with their tests, and faults that were planted by hand."""

from collections.abc import Mapping

WARM = ("torch", "transformers", "transformers.models.llama.modeling_llama", "hypothesis", "pydantic", "typer.testing")
"""What is loaded once, before the first fork; nothing of the package."""

PURE, OUTER = "pure", "outer"

ROOMS: Mapping[str, tuple[str, ...]] = {
    PURE: (
        "recipes/*.py",
        "checkpoint.py",
        "geometry.py",
        "reading/*.py",
        "evaluate/scoring/*.py",
        *(f"finetune/{name}.py" for name in ("loss", "merge", "rewrite", "tensors", "adapter_config")),
    ),
    OUTER: ("evaluate/report/*.py", "serving/*.py", "publish/*.py", "cli/*.py", "finetune/*.py"),
}
"""Files of the package: the rooms that compute, and those that talk to people, disks, engines and the Hub.

A file of both belongs to the first.
"""

_PURE_TESTS = (
    "tests/test_reading.py",
    "tests/test_schemas.py",
    "tests/test_families.py",
    "tests/test_cache_sizes.py",
    "tests/test_hub.py",
    "tests/test_older_versions.py",
    "tests/recipes/*.py",
    "tests/converters/test_c*.py",
    "tests/converters/test_[!cov]*.py",
    "tests/converters/test_other_files.py",
    "tests/search/test_space.py",
    "tests/search/test_bounds.py",
    "tests/search/test_measurement.py",
    "tests/portable/test_golden.py",
    "tests/portable/test_relation.py",
    "tests/cli/test_inspect_bounds.py",
    "tests/evaluate/test_scor*.py",
    "tests/evaluate/test_loss.py",
    "tests/evaluate/test_new_tasks.py",
    "tests/evaluate/test_tasks_text.py",
    "tests/evaluate/test_p*.py",
    "tests/evaluate/test_trust.py",
    "tests/test_checkpoint.py",
    "tests/finetune/test_chunked_loss.py",
    "tests/finetune/test_keep_short.py",
    "tests/finetune/test_merge*.py",
    "tests/finetune/test_places.py",
    "tests/finetune/test_rewrite.py",
    "tests/finetune/test_adapter_config.py",
    "tests/test_geometry.py",
    "tests/test_hub_client.py",
)
_OUTER_TESTS = (
    "tests/cli/*.py",
    "tests/evaluate/test_command.py",
    "tests/evaluate/test_findings.py",
    "tests/evaluate/test_intervals.py",
    "tests/evaluate/test_page.py",
    "tests/finetune/test_[!q]*.py",
    "tests/publish/test_push.py",
    "tests/search/test_search_command.py",
    "tests/serving/*.py",
    "tests/test_card.py",
    "tests/test_limits_of_options.py",
    "tests/test_tokens.py",
)
TESTS: Mapping[str, tuple[str, ...]] = {PURE: _PURE_TESTS, OUTER: _OUTER_TESTS}
"""Files of quick tests that may see a mutant; of each only the tests that call what was changed are run."""

LEFT: Mapping[str, Mapping[str, str]] = {
    "evaluate/report/colours.py": dict.fromkeys(("_STOPS", "_DASHES"), "Which colours and dashes they are."),
    "evaluate/scoring/as_written.py": {"_SHORTEST": "Which made-up token a model is given to forget longer prompts."},
    "evaluate/scoring/batch_size.py": dict.fromkeys(
        ("_MAX_ROWS", "_SHARE", "_STATES", "rows_that_fit", "_memory"),
        "How many prompts run at once: a guess at memory, on which no figure hangs.",
    ),
    "evaluate/scoring/exact_match.py": dict.fromkeys(
        ("_WORTH", "_PIECE", "_LARGE_PIECE"), "In which pieces a cache is filled: the same numbers come of any."
    ),
    "evaluate/scoring/prefix_cache.py": {
        "(_PROBE_LENGTH, _PROBE_KEPT, _PROBE_EXTRA)": "Of how many made-up tokens a trial is made: any number does."
    },
    "evaluate/scoring/token_losses.py": dict.fromkeys(
        ("_MIN_BYTES", "_piece_size"), "How many positions at once: the same losses come of any."
    )
    | {"(_PROBE_LENGTH, _PROBE_PIECE)": "Of how many made-up tokens a trial is made: any number does."},
    "finetune/loss.py": dict.fromkeys(
        ("_PIECE_BYTES", "_ACCELERATOR_BYTES", "positions_at_once"),
        "How many positions at once: the same loss comes of any.",
    )
    | {"(_PROBE_LENGTH, _PROBE_PIECE)": "Of how many made-up tokens a trial is made: any number does."},
    "finetune/rewrite.py": {"_CHUNK": "How many bytes at once."},
    "recipes/fills.py": {"_ROWS_AT_ONCE": "How many rows at once."},
}
"""Functions and constants that are not changed, by file, and why."""

EQUIVALENT: Mapping[tuple[str, str, str], str] = {
    (
        "reading/strict.py",
        'text.count("[") + text.count("{") > _MAX_DEPTH',
        "(text.count('[') + text.count('{') >= _MAX_DEPTH)",
    ): "The walk that finds depth is only taken where there may be some.",
    ("recipes/fills.py", "x <= 1", "(x < 1)"): "Both pieces of Keys's cubic are 0 at 1.",
    ("recipes/param.py", "1e30", "(1e+30)"): "One more is the same number in floating point.",
    ("evaluate/scoring/prefix_cache.py", "7", "(8)"): "Made-up tokens of a trial.",
    ("evaluate/scoring/token_losses.py", "11", "(12)"): "Made-up tokens of a trial.",
    ("finetune/loss.py", "11", "(12)"): "Made-up tokens of a trial.",
    (
        "finetune/merge.py",
        'keys or ["lm_head.weight"]',
        "(keys and ['lm_head.weight'])",
    ): "Under transformers 4 alone, where the same tests see it.",
}
"""Mutants that were looked at and change nothing that anybody could see, and why: file, before, after."""

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
_PAGE = ("tests/evaluate/test_page.py",)
_SERVING = ("tests/serving/test_row_wise.py", "tests/serving/test_vllm_models.py")

PLANTED: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("recipes/ntk.py", "(rotary.span / (rotary.dim - 2))", "(rotary.dim / (rotary.dim - 2))", _FORMULAS),
    ("recipes/rotary.py", "    text.pop(_ORIGINAL, None)\n", "", _OTHER_FILES),
    ("recipes/llama3.py", "self.high_freq_factor <= self", "self.high_freq_factor < self", _OTHER_FILES),
    ("recipes/base.py", "self.target_length <= encoding", "self.target_length < encoding", _OTHER_FILES),
    ("recipes/param.py", "if wanted is int and value != int(value):", "if False:", _FORMULAS),
    ("recipes/frequencies.py", ", dim - 1)", ", dim)", _FORMULAS),
    ("portable/mspoe.py", "min(math.ceil(last), 2 * size - 1)", "math.ceil(last)", _HEADS),
    ("portable/method.py", ' + inputs.get("cycle_offset", 0)', "", _HEADS),
    ("portable/mspoe.py", "call.mask, call.scaling)", "None, call.scaling)", _HEADS),
    ("portable/mspoe.py", "call.mask, call.scaling)", "call.mask)", _CALIBRATION),
    ("converters/calibration.py", 'if variant == "paper" else', "if variant else", _CALIBRATION),
    ("verify/logits.py", "_TOLERANCE = 1e-4", "_TOLERANCE = 0.1", ("tests/converters/test_verification.py",)),
    ("verify/loading_checks.py", "_TOLERANCE = 2e-5", "_TOLERANCE = 0.1", ("tests/publish/test_verify.py",)),
    ("converters/lengths.py", " and content.get(key) == before.claimed_length", "", _OTHER_FILES),
    ("search/pareto.py", "rise, rise + half", "rise, rise - half", _SEARCH),
    (
        "search/final_evaluation.py",
        "sum(found[number].rise(found[_STOCK])) <= keep_short",
        "found[number].rise(found[_STOCK])[0] <= keep_short",
        ("tests/search/test_bounds.py", "tests/search/test_end.py"),
    ),
    ("tokens.py", 'return _LOOKS_LIKE_ONE.sub(r"\\1…", text)', "return text", _TOKENS),
    ("cli/terminal.py", "return redacted(_UNSEEN.sub(", "return (_UNSEEN.sub(", _TERMINAL),
    ("cli/output.py", "text = redacted(json.dumps(", "text = (json.dumps(", _TERMINAL),
    ("cli/faults.py", "{visible(line)}", "{line}", ("tests/cli/test_faults.py",)),
    (
        "finetune/batches.py",
        'positions {step} {number}")',
        'positions {step}")',
        ("tests/finetune/test_training_data.py",),
    ),
    (
        "finetune/loop.py",
        "math.ceil(options.warmup",
        "math.floor(options.warmup",
        ("tests/finetune/test_finetune.py::test_warm_up_is_rounded_up",),
    ),
    ("evaluate/report/effective_length.py", "round(0.975 * _DRAWS) - 1", "round(0.99 * _DRAWS) - 1", _PAGE),
    (
        "evaluate/report/effective_length.py",
        'correct + cell["correct"], samples + cell["samples"]',
        'cell["correct"], cell["samples"]',
        _PAGE,
    ),
    ("evaluate/report/report.py", 'min((number + 1) * width, records[0]["length"])', "(number + 1) * width", _PAGE),
    (
        "data/chat_template.py",
        "        signal.setitimer(signal.ITIMER_VIRTUAL, 0)\n",
        "",
        ("tests/evaluate/test_chat_template.py",),
    ),
    (
        "publish/upload_plan.py",
        '("stamps", "links")',
        '("stamps",)',
        ("tests/publish/test_push.py::test_what_a_record_says_of_this_machine_is_not_published",),
    ),
    (
        "publish/push.py",
        "pull.author == user and pull.title == options.message",
        "pull.author == user",
        ("tests/publish/test_push.py::test_only_ones_own_pull_request_of_the_same_title_is_used_again",),
    ),
    (
        "publish/push.py",
        "pull.author == user and pull.title == options.message",
        "pull.title == options.message",
        ("tests/publish/test_push.py::test_only_ones_own_pull_request_of_the_same_title_is_used_again",),
    ),
    (
        "publish/hub_errors.py",
        "status >= 500",
        "status > 500",
        ("tests/publish/test_push.py::test_what_is_tried_again",),
    ),
    ("serving/row_wise.py", 'options["softcap"] = cap', "pass", _SERVING),
    ("serving/row_wise.py", "if not torch.equal(found[held].sort().values, numbers):", "if not held.any():", _SERVING),
    ("serving/row_wise.py", "key.shape[1], self.first_head", "key.shape[1], 0", _SERVING),
    ("serving/vllm_models.py", "rank * model.text_config.num_key_value_heads // ranks", "rank", _SERVING),
    (
        "portable/method.py",
        "found * (torch.distributed.get_rank() % ranks)",
        "torch.distributed.get_rank() % ranks",
        ("tests/portable/test_tensor_parallel.py::test_the_first_head_of_a_rank",),
    ),
    ("tokens.py", "(hf_|api_org_|", "(hf_|", ("tests/test_tokens.py::test_every_kind_of_token_is_known_by_its_form",)),
    (
        "cli/config_file.py",
        '"dry_run", "token", ',
        '"dry_run", ',
        ("tests/finetune/test_finetune_command.py::test_a_run_is_written_as_a_file_that_runs_again",),
    ),
    (
        "cli/push.py",
        "check=verify",
        "check=True",
        ("tests/publish/test_push.py::test_no_verify_shares_what_was_changed",),
    ),
    (
        "cli/convert.py",
        "check=verify",
        "check=True",
        ("tests/cli/test_convert_command.py::test_no_verify_checks_nothing",),
    ),
    (
        "verify/file_checks.py",
        "tokenizer not in (None, config)",
        "tokenizer is not None and tokenizer < (config or 0)",
        ("tests/publish/test_verify.py::test_a_tokenizer_of_another_length_is_found_even_if_recorded",),
    ),
    (
        "portable/distance.py",
        "bool(numbers[0].any())",
        "bool(numbers[1].any())",
        ("tests/portable/test_distance.py::test_slopes_alone_say_whether_anything_was_learned",),
    ),
    (
        "portable/mspoe.py",
        "factor = frame.scaling * own[2][:, None, None]",
        "factor = own[2][:, None, None]",
        ("tests/portable/test_schedules.py::test_heads_of_their_own_keep_the_factor_of_any_base",),
    ),
    (
        "portable/modeling_family.py",
        'rope = {**settings["rope"], **settings.get("held", {})}',
        'rope = {**settings["rope"]}',
        ("tests/portable/test_schedules.py::test_longrope_keeps_its_factor_where_the_length_grows",),
    ),
    (
        "verify/logits.py",
        "if not math.isfinite(relative) or relative > _TOLERANCE:",
        "if relative > _TOLERANCE:",
        ("tests/converters/test_verification.py::test_what_is_no_number_is_refused",),
    ),
    (
        "verify/loading_checks.py",
        "if found.error or found.missing:",
        "if found.error:",
        ("tests/publish/test_verify.py::test_a_model_that_lacks_weights_or_does_not_load_is_found",),
    ),
    (
        "verify/isolated.py",
        '"USE_HUB_KERNELS": "NO", ',
        "",
        ("tests/test_isolated.py::test_it_has_no_network_and_no_kernels",),
    ),
    (
        "staging.py",
        "        checkpoint.check_file(path)\n        (folder / path).parent",
        "        (folder / path).parent",
        ("tests/test_staging.py::test_a_link_out_of_the_folder_is_not_loaded",),
    ),
    (
        "staging.py",
        ' or key.endswith("_file")}',
        "}",
        ("tests/test_staging.py::test_a_tokenizer_names_no_files_elsewhere",),
    ),
    (
        "staging.py",
        '        weights = {name for name in weights if ".bin" not in name}',
        "        pass",
        ("tests/test_staging.py::test_a_folder_to_load_from_holds_listed_files_alone",),
    ),
    (
        "loading.py",
        "return [cleaned(inner) for inner in value] if isinstance(value, list) else value",
        "return value",
        ("tests/test_staging.py::test_what_a_configuration_names_elsewhere_is_left_out_at_any_depth",),
    ),
    (
        "recipes/own_code.py",
        "return content if is_same else {}",
        "return content",
        ("tests/recipes/test_own_code.py::test_code_that_changes_while_it_is_compared_is_not_loaded",),
    ),
    (
        "files.py",
        "return [found.st_dev, found.st_ino, str(link.readlink())]",
        "return [found.st_dev, found.st_ino]",
        ("tests/test_checkpoint.py::test_a_link_to_elsewhere_is_not_the_noted_one_whatever_its_number",),
    ),
    (
        "portable/relation_parts.py",
        "return bool((shown[:, 1:] & (m[:, 1:] < highest[:, :-1])).any())",
        "return bool((m[:, 1:] < highest[:, :-1]).any())",
        ("tests/portable/test_relation.py::test_texts_that_begin_again_under_flash_attention_are_refused",),
    ),
    (
        "verify/file_checks.py",
        "{**config, **expected}",
        "expected",
        ("tests/publish/test_verify.py::test_configuration_that_contradicts_its_recipe_is_found_even_if_recorded",),
    ),
    (
        "verify/subject.py",
        "not (needs_code or is_unknown)",
        "not needs_code",
        ("tests/publish/test_verify.py::test_what_may_be_loaded_with_and_without_leave",),
    ),
    (
        "data/chat_template.py",
        "        resource.setrlimit(resource.RLIMIT_AS, before)\n",
        "        pass\n",
        ("tests/evaluate/test_chat_template.py::test_the_limit_of_memory_is_set_and_taken_back",),
    ),
    (
        "tokens.py",
        "    remember(*found.split())\n",
        "",
        ("tests/test_tokens.py::test_a_token_that_is_refused_is_hidden_from_then_on",),
    ),
    (
        "cli/verify.py",
        "not all(row.is_alike",
        "not any(row.is_alike",
        ("tests/test_in_engine.py::test_one_prompt_that_differs_fails_all",),
    ),
    (
        "evaluate/served.py",
        "    _overrides(info, max(lengths))\n\n",
        "    _overrides(info, min(lengths))\n\n",
        ("tests/evaluate/test_engine.py::test_the_longest_length_decides_what_it_has_positions_for",),
    ),
)
"""File, what stands there once, what to put in its place, and the tests that must fail then."""
