"""What `mutate.py` breaks and which tests must see it: rooms with their tests, and faults that were planted by hand."""

from collections.abc import Mapping

WARM = ("torch", "transformers", "transformers.models.llama.modeling_llama", "hypothesis", "pydantic", "typer.testing")
"""What is loaded once, before the first fork; nothing of the package."""

PURE, OUTER = "pure", "outer"

ROOMS: Mapping[str, tuple[str, ...]] = {
    PURE: (
        "recipes/*.py",
        "recipes/*/*.py",
        "checkpoint/opening.py",
        "checkpoint/geometry.py",
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
    "tests/cli/test_other_commands.py",
    "tests/test_checkpoint.py",
    "tests/test_docs.py",
    "tests/test_reading.py",
    "tests/test_safetensors_header.py",
    "tests/test_staging.py",
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
    "tests/search/test_measurement.py",
    "tests/portable/test_golden.py",
    "tests/portable/test_relation.py",
    "tests/cli/test_inspect_bounds.py",
    "tests/evaluate/test_scor*.py",
    "tests/evaluate/test_loss.py",
    "tests/evaluate/test_new_tasks.py",
    "tests/evaluate/test_tasks_text.py",
    "tests/evaluate/test_p*.py",
    "tests/evaluate/test_loading.py",
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
    "tests/evaluate/test_page.py",
    "tests/evaluate/test_report_whole.py",
    "tests/finetune/test_*.py",
    "tests/publish/test_push.py",
    "tests/publish/test_results.py",
    "tests/publish/test_what_is_shared.py",
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
    "recipes/methods/fills.py": {"_ROWS_AT_ONCE": "How many rows at once."},
}
"""Functions and constants that are not changed, by file, and why."""

EQUIVALENT: Mapping[tuple[str, str, str], str] = {
    (
        "reading/strict.py",
        'text.count("[") + text.count("{") > _MAX_DEPTH',
        "(text.count('[') + text.count('{') >= _MAX_DEPTH)",
    ): "The walk that finds depth is only taken where there may be some.",
    ("recipes/encodings/rotary.py", "factor <= 1", "(factor < 1)"): "The logarithm of 1 is 0, so the factor is 1 too.",
    ("recipes/methods/fills.py", "x <= 1", "(x < 1)"): "Both pieces of Keys's cubic are 0 at 1.",
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
    "tests/portable/test_families_mspoe.py::test_the_last_depth_alone_takes_part",
    "tests/portable/test_generation.py",
)
_CALIBRATION = ("tests/converters/test_calibration.py",)
_SEARCH = (
    "tests/search/test_measurement.py::test_a_rise_that_only_may_be_small_does_not_count",
    "tests/search/test_measurement.py::test_nor_in_the_run_off",
)
_TOKENS = ("tests/test_tokens.py",)
_TERMINAL = ("tests/cli/test_terminal.py",)
_PAGE = ("tests/evaluate/test_page.py",)
_SERVING = ("tests/serving/test_row_wise.py", "tests/serving/test_vllm_models.py")

_PADDED = ("tests/portable/test_relation.py",)
_PARTS = ("tests/portable/test_relation_parts.py",)
_CHECKS = ("tests/publish/test_file_checks.py",)
_ENGINE = ("tests/test_in_engine.py",)
_EVALUATED = ("tests/evaluate/test_what_is_asked.py",)
_ASKED = ("tests/evaluate/test_engine.py::test_what_the_engine_is_asked_for",)
_TEXTS = ("tests/evaluate/test_texts.py",)
_LOADING = ("tests/test_loading.py",)
_STAGING = ("tests/test_staging.py",)
_CHECKPOINT = ("tests/test_checkpoint.py",)
_HUB = ("tests/test_hub_client.py",)
_NUMBER = ("tests/converters/test_strangers_files.py",)

PLANTED: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("recipes/methods/ntk.py", "(rotary.span / (rotary.dim - 2))", "(rotary.dim / (rotary.dim - 2))", _FORMULAS),
    ("recipes/encodings/rotary.py", "    text.pop(_ORIGINAL, None)\n", "", _OTHER_FILES),
    ("recipes/methods/llama3.py", "self.high_freq_factor <= self", "self.high_freq_factor < self", _OTHER_FILES),
    ("recipes/base.py", "self.target_length <= encoding", "self.target_length < encoding", _OTHER_FILES),
    ("recipes/param.py", "if wanted is int and value != int(value):", "if False:", _FORMULAS),
    ("recipes/encodings/frequencies.py", ", dim - 1)", ", dim)", _FORMULAS),
    ("portable/mspoe.py", "min(math.ceil(last), 2 * size - 1)", "math.ceil(last)", _HEADS),
    ("portable/method.py", ' + inputs.get("cycle_offset", 0)', "", _HEADS),
    ("portable/mspoe.py", "call.mask, call.scaling)", "None, call.scaling)", _HEADS),
    ("portable/mspoe.py", "call.mask, call.scaling)", "call.mask)", _CALIBRATION),
    ("converters/calibration.py", 'if variant == "paper" else', "if variant else", _CALIBRATION),
    ("verify/logits.py", "TOLERANCE = 1e-4", "TOLERANCE = 0.1", ("tests/converters/test_verification.py",)),
    ("verify/loading_checks.py", "_TOLERANCE = 2e-5", "_TOLERANCE = 0.1", ("tests/publish/test_verify.py",)),
    ("converters/lengths.py", " and content.get(key) == before.claimed_length", "", _OTHER_FILES),
    ("search/pareto.py", "rise, rise + half", "rise, rise - half", _SEARCH),
    (
        "search/final_evaluation.py",
        "sum(measurements[number].rise(stock)) <= keep_short",
        "measurements[number].rise(stock)[0] <= keep_short",
        (*_SEARCH, "tests/search/test_end.py"),
    ),
    ("system/tokens.py", 'return _LOOKS_LIKE_ONE.sub(r"\\1…", text)', "return text", _TOKENS),
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
        "finetune/run.py",
        'if is_first() and not any(folder.glob("checkpoint-*")):',
        "if is_first():",
        ("tests/finetune/test_places.py::test_a_run_that_fails_keeps_its_saves",),
    ),
    (
        "finetune/data.py",
        "documents.share if isinstance(documents, Documents) else lambda length: 1.0",
        "lambda length: 1.0",
        ("tests/finetune/test_mixture.py::test_a_short_run_sees_many_documents",),
    ),
    (
        "finetune/data.py",
        "            kind.fill()\n",
        "",
        ("tests/finetune/test_mixture.py::test_pieces_are_distinct_and_all_are_there_when_needed",),
    ),
    (
        "finetune/documents.py",
        "piece_size=_CHARACTERS * max(self.wanted, default=0)",
        "piece_size=0",
        ("tests/finetune/test_mixture.py::test_documents_are_sampled_by_their_length",),
    ),
    (
        "finetune/documents.py",
        "num_wanted=sum(self.wanted.values()) + _MORE if self.wanted else None",
        "num_wanted=None",
        ("tests/finetune/test_mixture.py::test_what_the_run_does_not_need_is_not_copied",),
    ),
    (
        "finetune/documents.py",
        "min(1.0, length * self._num_read / max(1, self._num_tokens_read))",
        "1.0",
        ("tests/finetune/test_mixture.py::test_a_stream_is_sampled_too",),
    ),
    (
        "finetune/watch.py",
        "    signal.SIGTERM: (signal.SIG_DFL, raise_terminated),\n",
        "",
        ("tests/finetune/test_stopping.py::test_sigterm_saves_the_step_that_runs",),
    ),
    (
        "finetune/watch.py",
        "        self._restore(signal.SIGINT)\n",
        "        self._restore(number)\n",
        ("tests/finetune/test_stopping.py::test_sigterm_is_repeated_by_launchers_and_the_save_goes_on",),
    ),
    (
        "finetune/merge.py",
        "+ _added_bytes(checkpoint.folder / path, changes)",
        "",
        (
            "tests/finetune/test_merge_files.py::test_a_tie_that_training_cut_is_cut_in_the_configuration_and_in_the_index",
        ),
    ),
    (
        "finetune/loop.py",
        "math.ceil(options.warmup",
        "math.floor(options.warmup",
        ("tests/finetune/test_finetune.py::test_warm_up_is_rounded_up",),
    ),
    ("evaluate/report/report.py", "round(0.975 * _DRAWS) - 1", "round(0.99 * _DRAWS) - 1", _PAGE),
    (
        "evaluate/report/report.py",
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
        "publish/push.py",
        "status >= 500",
        "status > 500",
        ("tests/publish/test_push.py::test_what_is_tried_again",),
    ),
    ("serving/row_wise.py", 'options["softcap"] = cap', "pass", _SERVING),
    (
        "serving/row_wise.py",
        "if not torch.equal(decoded[written].sort().values, numbers):",
        "if not written.any():",
        _SERVING,
    ),
    ("serving/row_wise.py", "key.shape[1], self.first_head", "key.shape[1], 0", _SERVING),
    ("serving/vllm_models.py", "rank * model.text_config.num_key_value_heads // ranks", "rank", _SERVING),
    (
        "portable/method.py",
        "count * (torch.distributed.get_rank() % ranks)",
        "torch.distributed.get_rank() % ranks",
        ("tests/portable/test_tensor_parallel.py::test_the_first_head_of_a_rank",),
    ),
    (
        "system/tokens.py",
        "(hf_|api_org_|",
        "(hf_|",
        ("tests/test_tokens.py::test_every_kind_of_token_is_known_by_its_form",),
    ),
    (
        "cli/finetune.py",
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
        "converters/convert.py",
        "check_frequencies(plan) if options.check else None",
        "check_frequencies(plan)",
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
        "factor = frame.scaling * curves[2][:, None, None]",
        "factor = curves[2][:, None, None]",
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
        "if not math.isfinite(relative) or relative > tolerance:",
        "if relative > tolerance:",
        ("tests/converters/test_verification.py::test_what_is_no_number_is_refused",),
    ),
    (
        "verify/loading_checks.py",
        "if report.error or report.missing:",
        "if report.error:",
        ("tests/publish/test_verify.py::test_a_model_that_lacks_weights_or_does_not_load_is_found",),
    ),
    (
        "system/isolated.py",
        '"USE_HUB_KERNELS": "NO", ',
        "",
        ("tests/test_isolated.py::test_it_has_no_network_and_no_kernels",),
    ),
    (
        "recipes/code/staging.py",
        "        checkpoint.check_file(path)\n        (folder / path).parent",
        "        (folder / path).parent",
        ("tests/test_staging.py::test_a_link_out_of_the_folder_is_not_loaded",),
    ),
    (
        "recipes/code/staging.py",
        ' or key.endswith("_file")}',
        "}",
        ("tests/test_staging.py::test_a_tokenizer_names_no_files_elsewhere",),
    ),
    (
        "recipes/code/staging.py",
        '        weights = {name for name in weights if ".bin" not in name}',
        "        pass",
        ("tests/test_staging.py::test_a_folder_to_load_from_holds_listed_files_alone",),
    ),
    (
        "system/loading.py",
        "return [cleaned(inner) for inner in value] if isinstance(value, list) else value",
        "return value",
        ("tests/test_staging.py::test_what_a_configuration_names_elsewhere_is_left_out_at_any_depth",),
    ),
    (
        "recipes/code/own_code.py",
        "return content if is_same else {}",
        "return content",
        ("tests/recipes/test_own_code.py::test_code_that_changes_while_it_is_compared_is_not_loaded",),
    ),
    (
        "system/files.py",
        "return [status.st_dev, status.st_ino, str(link.readlink())]",
        "return [status.st_dev, status.st_ino]",
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
        "system/tokens.py",
        "    remember(*stripped.split())\n",
        "",
        ("tests/test_tokens.py::test_a_token_that_is_refused_is_hidden_from_then_on",),
    ),
    (
        "cli/verify.py",
        "not all(row.is_alike",
        "not any(row.is_alike",
        ("tests/test_in_engine.py::test_one_prompt_that_differs_fails_all",),
    ),
    ("evaluate/plan.py", "usual = known if settings.allow_beyond else [", "usual = [", _EVALUATED),
    ("evaluate/plan.py", "allow_beyond=settings.allow_beyond)", "allow_beyond=True)", _EVALUATED),
    ("evaluate/plan.py", "check_served(info, lengths[info.name])", "check_served(info, usual)", _EVALUATED),
    ("evaluate/plan.py", "max(settings.lengths, default=longest)", "max(settings.lengths)", _EVALUATED),
    ("evaluate/served.py", '("default", "linear")', '("default",)', _EVALUATED),
    ("evaluate/served.py", "{key: more} if nested else more", "more", _EVALUATED),
    (
        "evaluate/served.py",
        "row is not None and row.status != EXACT",
        "row is not None",
        ("tests/evaluate/test_engine.py::test_a_remark_on_a_checkpoint_that_is_served_exactly_need_not_be_minded",),
    ),
    (
        "data/prose.py",
        "for noun in rng.sample(OBJECTS, count)]",
        "for noun in rng.choices(OBJECTS, k=count)]",
        _EVALUATED,
    ),
    ("data/prose.py", "        if name not in used:", "        if name:", _EVALUATED),
    (
        "evaluate/served.py",
        "    _overrides(info, max(lengths))\n\n",
        "    _overrides(info, min(lengths))\n\n",
        ("tests/evaluate/test_engine.py::test_the_longest_length_decides_what_it_has_positions_for",),
    ),
    (
        "evaluate/report/report.py",
        'key=lambda record: record["samples"][0])\n    if not records:\n        return None\n    losses',
        "key=lambda record: 0)\n    if not records:\n        return None\n    losses",
        ("tests/evaluate/test_report_whole.py::test_the_order_of_the_lines_does_not_matter",),
    ),
    (
        "evaluate/report/report.py",
        "key=lambda key: (order[key[0]], key[1], key[2] or 0.0)",
        "key=lambda key: (key[0], key[1], key[2] or 0.0)",
        ("tests/evaluate/test_report_whole.py::test_cells_are_what_was_answered_whoever_asked_twice",),
    ),
    (
        "evaluate/report/report.py",
        "math.exp(min(loss, 700.0))",
        "math.exp(loss)",
        ("tests/evaluate/test_report_whole.py::test_a_loss_that_no_perplexity_can_be_written_of_ends_no_report",),
    ),
    (
        "evaluate/report/report.py",
        '_mean([record["sliding"][length]',
        '_mean([record["lengths"][length]',
        ("tests/evaluate/test_report_whole.py::test_loss_on_long_text_is_the_mean_over_tokens_of_all_documents",),
    ),
    (
        "evaluate/report/findings.py",
        'math.fsum(point["loss"] * point["count"] for point in points) / weights',
        'math.fsum(point["loss"] for point in points) / len(points)',
        ("tests/evaluate/test_report_whole.py::test_points_with_more_tokens_count_for_more",),
    ),
    (
        "evaluate/report/findings.py",
        "percent(shares[rest[-1]][0]), percent(shares[rest[0]][0])",
        "percent(shares[rest[0]][0]), percent(shares[rest[-1]][0])",
        ("tests/evaluate/test_report_whole.py::test_many_models_are_told_by_their_ends",),
    ),
    (
        "evaluate/report/report.py",
        'facts: Record = next((record["facts"] for record in of_model if "facts" in record), {})',
        'facts: Record = next((record["facts"] for record in records if "facts" in record), {})',
        ("tests/evaluate/test_report_whole.py::test_the_order_of_the_lines_does_not_matter",),
    ),
    (
        "evaluate/report/report.py",
        'if source["length"] == short["length"]:',
        "if source:",
        ("tests/evaluate/test_report_whole.py::test_the_cost_is_told_against_the_source_at_the_same_length_alone",),
    ),
    (
        "evaluate/report/page.py",
        "first[1] > max(high",
        "first[0] > max(high",
        ("tests/evaluate/test_page.py::test_bold_is_what_lies_above_all_other_intervals",),
    ),
    (
        "evaluate/report/findings.py",
        'sign = "≥ " if effective["length"] == longest',
        'sign = "≥ " if effective["length"] < longest',
        ("tests/evaluate/test_report_whole.py::test_the_summary_row_by_row",),
    ),
    (
        "evaluate/report/page.py",
        'cells = [cell for cell in model["cells"] if cell["length"] == length]\n    return pooled(cells)',
        'cells = [cell for cell in model["cells"] if cell["length"] == length][:1]\n    return pooled(cells)',
        ("tests/evaluate/test_report_whole.py::test_the_summary_row_by_row",),
    ),
    (
        "evaluate/report/report.py",
        "of_model = heat_map([model], task)",
        'of_model = heat_map(report["models"], task)',
        ("tests/evaluate/test_report_whole.py::test_files_of_a_report",),
    ),
    (
        "evaluate/report/report.py",
        '.strip("-.") or "model"',
        '.strip("-.")',
        ("tests/evaluate/test_report_whole.py::test_files_of_a_report",),
    ),
    (
        "evaluate/report/page.py",
        "max(map(len, names)) <= _LONG_NAME",
        "min(map(len, names)) <= _LONG_NAME",
        ("tests/evaluate/test_report_whole.py::test_names_that_differ_little",),
    ),
    (
        "evaluate/report/page.py",
        "counts[part] < _COMMON",
        "counts[part] <= _COMMON",
        ("tests/evaluate/test_report_whole.py::test_names_that_differ_little",),
    ),
    (
        "evaluate/report/page.py",
        'report["settings"]["generate"] or (kind is not None and kind.is_written)',
        'report["settings"]["generate"]',
        ("tests/evaluate/test_report_whole.py::test_the_maps_of_a_task",),
    ),
    (
        "evaluate/report/page.py",
        'length > model["trained_length"] else ""',
        'length >= model["trained_length"] else ""',
        ("tests/evaluate/test_report_whole.py::test_the_maps_of_a_task",),
    ),
    (
        "evaluate/report/page.py",
        "effective_text(effective, scores.lengths[-1])",
        "effective_text(effective, scores.lengths[0])",
        ("tests/evaluate/test_report_whole.py::test_an_effective_length_at_the_longest_may_be_longer",),
    ),
    (
        "evaluate/report/page.py",
        '"–" if cell["depth"] is None',
        '"–" if not cell["depth"]',
        ("tests/evaluate/test_report_whole.py::test_the_maps_of_a_task",),
    ),
    (
        "evaluate/report/page.py",
        ".get(str(length))) for kind, _ in kinds for length in lengths]",
        ".get(str(length))) for length in lengths for kind, _ in kinds]",
        ("tests/evaluate/test_report_whole.py::test_the_other_tables_of_the_page",),
    ),
    (
        "evaluate/report/page.py",
        'data["name"] if isinstance(data, dict) else data or',
        'data["name"] if isinstance(data, dict) else',
        ("tests/evaluate/test_report_whole.py::test_the_page_names_the_text",),
    ),
    (
        "evaluate/report/page.py",
        'source = escape(names.get(against["model"], against["model"])) if against else "–"',
        'source = escape(names.get(model["name"], "")) if against else "–"',
        ("tests/evaluate/test_report_whole.py::test_the_other_tables_of_the_page",),
    ),
    (
        "publish/upload_plan.py",
        '("device", "dtype",',
        '("device",',
        (
            "tests/publish/test_what_is_shared.py::test_the_command_of_a_training_names_what_was_chosen_and_nothing_of_the_machine",
        ),
    ),
    (
        "publish/upload_plan.py",
        'f"{value:g}" if isinstance(value, float)',
        'f"{value:.3f}" if isinstance(value, float)',
        (
            "tests/publish/test_what_is_shared.py::test_the_command_of_a_training_names_what_was_chosen_and_nothing_of_the_machine",
        ),
    ),
    (
        "publish/push.py",
        'return redacted(" ".join(text.split()))',
        'return " ".join(text.split())',
        ("tests/publish/test_what_is_shared.py::test_each_answer_of_the_hub_in_one_line",),
    ),
    (
        "publish/push.py",
        "private=options.private or None, exist_ok=True",
        "exist_ok=True",
        ("tests/publish/test_what_is_shared.py::test_what_is_to_be_private_is",),
    ),
    (
        "publish/push.py",
        "[glob.escape(name) for name in sizes]",
        "list(sizes)",
        ("tests/publish/test_what_is_shared.py::test_all_is_sent_but_what_is_hidden",),
    ),
    (
        "publish/push.py",
        "    if missing:\n",
        "    if False:\n",
        ("tests/publish/test_what_is_shared.py::test_what_the_hub_did_not_keep_is_told",),
    ),
    (
        "publish/push.py",
        "done.oid != head",
        "done.oid == head",
        ("tests/publish/test_what_is_shared.py::test_all_is_sent_but_what_is_hidden",),
    ),
    (
        "publish/upload_plan.py",
        'base_id.count("/") != 1 or Path(base_id).is_absolute()',
        'base_id.count("/") != 1',
        ("tests/publish/test_what_is_shared.py::test_bases_that_nobody_finds",),
    ),
    (
        "publish/upload_plan.py",
        "(folder / ADAPTER, folder) if",
        "(folder, folder / ADAPTER) if",
        ("tests/publish/test_what_is_shared.py::test_which_adapter_is_meant",),
    ),
    (
        "publish/upload_plan.py",
        "    if not path.is_file() or recorded is None or sha256_of(path) == recorded:",
        "    if not path.is_file() or sha256_of(path) == recorded:",
        ("tests/publish/test_what_is_shared.py::test_a_card_of_unknown_origin_is_written_again",),
    ),
    (
        "publish/upload_plan.py",
        "/ 1e6:,.1f",
        "/ 1e3:,.1f",
        ("tests/publish/test_what_is_shared.py::test_sizes_for_people",),
    ),
    (
        "system/locks.py",
        "        os.close(descriptor)\n\n\ndef _holder",
        "        pass\n\n\ndef _holder",
        ("tests/test_locks.py::test_a_lock_is_there_while_it_is_held_and_leaves_nothing",),
    ),
    (
        "system/locks.py",
        "out = out.resolve()",
        "out = out.absolute()",
        ("tests/test_locks.py::test_one_output_by_any_of_its_names_is_one",),
    ),
    (
        "system/locks.py",
        " | os.O_NOFOLLOW",
        "",
        ("tests/test_locks.py::test_a_link_in_the_place_of_a_lock_is_not_followed",),
    ),
    (
        "system/locks.py",
        "except BlockingIOError:\n            os.close(descriptor)\n",
        "except BlockingIOError:\n",
        ("tests/test_locks.py::test_one_output_by_any_of_its_names_is_one",),
    ),
    (
        "system/locks.py",
        "read_bytes()[:99]",
        "read_bytes()[:9]",
        ("tests/test_locks.py::test_one_output_by_any_of_its_names_is_one",),
    ),
    (
        "system/files.py",
        ".free < size",
        ".free <= size",
        ("tests/test_locks.py::test_the_disk_that_is_written_to_must_have_room",),
    ),
    (
        "finetune/merge.py",
        "if path.is_file() and not path.is_symlink():",
        "if path.is_file():",
        ("tests/finetune/test_merge.py",),
    ),
    (
        "publish/upload_plan.py",
        "    subject.checkpoint.check_files()  #",
        "    pass  #",
        ("tests/publish/test_what_is_shared.py::test_links_in_a_checkpoint_are_not_shared_with_or_without_the_checks",),
    ),
    (
        "publish/upload_plan.py",
        "    _check_links(folder, [place / name for name in names])\n",
        "",
        ("tests/publish/test_what_is_shared.py::test_links_in_an_adapter_s_folder_are_not_shared",),
    ),
    (
        "publish/upload_plan.py",
        "        _check_links(report, files)\n",
        "        pass\n",
        ("tests/publish/test_what_is_shared.py::test_links_in_a_report_s_folder_are_not_shared",),
    ),
    (
        "publish/upload_plan.py",
        "rewritten=FOLDER if report else None",
        "rewritten=None",
        ("tests/publish/test_what_is_shared.py::test_a_report_that_was_shared_may_be_replaced_and_nothing_else",),
    ),
    (
        "publish/upload_plan.py",
        'curve="" if is_adapter else',
        "curve=",
        ("tests/publish/test_what_is_shared.py::test_the_card_is_told_all_that_the_record_says",),
    ),
    (
        "publish/upload_plan.py",
        "for version in (stripped, checkpoint)]",
        "for version in (checkpoint,)]",
        ("tests/publish/test_what_is_shared.py::test_what_lies_in_the_folder_of_a_report_is_no_other_checkpoint",),
    ),
    (
        "publish/upload_plan.py",
        "for version in (stripped, checkpoint)]",
        "for version in (stripped,)]",
        ("tests/publish/test_what_is_shared.py::test_what_lies_in_the_folder_of_a_report_is_no_other_checkpoint",),
    ),
    (
        "publish/upload_plan.py",
        "cautions=cautions_of(checkpoint, recipe, subject.model) if recipe else (),",
        "cautions=[],",
        ("tests/publish/test_what_is_shared.py::test_the_card_is_told_all_that_the_record_says",),
    ),
    (
        "publish/upload_plan.py",
        'rewritten=[*(subject.manifest.get("rewritten") or {})],',
        "rewritten=[],",
        ("tests/publish/test_what_is_shared.py::test_the_card_is_told_all_that_the_record_says",),
    ),
    (
        "publish/results.py",
        '"encoder": "feature-extraction"',
        '"encoder": "text-generation"',
        ("tests/publish/test_results.py",),
    ),
    (
        "publish/results.py",
        'all(cell["share"] == share for cell in at_length)',
        'any(cell["share"] == share for cell in at_length)',
        ("tests/publish/test_results.py::test_a_depth_like_the_mean_hides_no_weaker_one",),
    ),
    (
        "serving/row_wise.py",
        "self.first = min(relation_map.first for",
        "self.first = max(relation_map.first for",
        ("tests/serving/test_row_wise.py::test_several_maps_act_from_the_first_border_on_the_innermost_first",),
    ),
    (
        "serving/row_wise.py",
        "for method in self.methods:\n            inner",
        "for method in reversed(self.methods):\n            inner",
        ("tests/serving/test_row_wise.py::test_several_maps_act_from_the_first_border_on_the_innermost_first",),
    ),
    (
        "serving/row_wise.py",
        "if attn_metadata is not None:",
        "if True:",
        ("tests/serving/test_row_wise.py::test_an_engine_that_warms_up_is_left_alone",),
    ),
    (
        "portable/relation.py",
        "first = int(changed.any(0).long().argmax())",
        "first = int(changed[0].long().argmax())",
        _PADDED,
    ),
    (
        "portable/relation.py",
        "served = 0 if bool(changed.all()) else int((~changed).any(0).nonzero().amax()) + 1",
        "served = 0 if bool(changed.all()) else int((~changed)[0].nonzero().amax()) + 1",
        _PADDED,
    ),
    ("portable/relation.py", "is_far.long().cumprod(-1).sum(-1).amin()", "is_far.long().sum(-1).amin()", _PARTS),
    (
        "portable/relation_parts.py",
        "kept = torch.cat([kept[:, :seen], rows], 1)",
        "kept = torch.cat([kept, rows], 1)",
        _PARTS,
    ),
    (
        "portable/relation_parts.py",
        "if not traced and len(kept) > 1 and bool((kept == kept[:1]).all()):",
        "if not traced and len(kept) > 1 and bool((rows == rows[:1]).all()):",
        _PARTS,
    ),
    (
        "portable/relation_parts.py",
        "        rows = rows + torch.nn.functional.pad(last[..., :1] - last[..., 1:], (0, 1))\n",
        "        rows = rows + torch.nn.functional.pad(last[:1, ..., :1] - last[:1, ..., 1:], (0, 1))\n",
        _PARTS,
    ),
    ("portable/relation_parts.py", "facts != [rungs, origins]", "facts[:1] != [rungs]", _PARTS),
    (
        "portable/relation_parts.py",
        "mask is None or bool((mask[:, :total] != 0).all()) else None",
        "mask is None or bool((mask[0, :total] != 0).all()) else None",
        _PARTS,
    ),
    ("portable/modeling_alibi.py", "(mask == 0).sum(-1)[:, 0] - 1", "(mask == 0).sum(-1)[:, 0]", _PARTS),
    (
        "verify/file_checks.py",
        '"revision": (source.get("revision"), noted.get("revision")),',
        '"revision": (source.get("revision"), source.get("revision")),',
        _CHECKS,
    ),
    ("verify/file_checks.py", "for name in [*recorded, *weights] if name", "for name in recorded if name", _CHECKS),
    ("verify/file_checks.py", "    if touched:\n", "    if touched and not known:\n", _CHECKS),
    ("verify/file_checks.py", "or path.stat().st_size != stamp[0]", "or path.stat().st_size == stamp[0]", _CHECKS),
    (
        "verify/file_checks.py",
        '    if not _same_but_heads(actual.get("auto_map"), expected.get("auto_map")):',
        '    if actual.get("auto_map") and not _same_but_heads(actual.get("auto_map"), expected.get("auto_map")):',
        _CHECKS,
    ),
    (
        "verify/file_checks.py",
        'different += [f"{nested}.{key}" for key in _differences(config[nested], expected[nested], None)]',
        "pass",
        _CHECKS,
    ),
    (
        "verify/file_checks.py",
        "(name := path.as_posix()) in recorded or not is_own_code(path)]",
        "not is_own_code(path) and (name := path.as_posix())]",
        _CHECKS,
    ),
    ("verify/file_checks.py", "if len(known) < len(recorded):", "if not known:", _CHECKS),
    (
        "verify/subject.py",
        "        check_described(self.checkpoint, auto_class(self.checkpoint.config))\n",
        "",
        _CHECKS,
    ),
    (
        "verify/subject.py",
        'record = subject.manifest.get("finetune") or noted or {}',
        'record = subject.manifest.get("finetune") or {}',
        _CHECKS,
    ),
    ("verify/loading_checks.py", 'types = ("", *subject.family.full_types)', 'types = ("",)', _CHECKS),
    ("verify/loading_checks.py", "    for entry in modules:\n", "    for entry in modules[:1]:\n", _CHECKS),
    (
        "verify/loading_checks.py",
        '_OTHER_TOWERS = ("vision", "visual", "audio")',
        '_OTHER_TOWERS = ("vision", "audio")',
        _CHECKS,
    ),
    (
        "verify/loading_checks.py",
        "stock = subject.recipe.edit(subject.plain, with_code=False)",
        "stock = subject.plain",
        _CHECKS,
    ),
    ("verify/loading_checks.py", "        foreign=subject.runs_foreign_code,\n", "", _CHECKS),
    ("verify/logits.py", "max(differences.values()), change", "min(differences.values()), change", _CHECKS),
    (
        "verify/run.py",
        "open_checkpoint(against, token=token)",
        "open_checkpoint(against, revision=revision, token=token)",
        _CHECKS,
    ),
    ("verify/run.py", "open_checkpoint(against, token=token)", "open_checkpoint(against)", _CHECKS),
    (
        "verify/run.py",
        "    except OSError as error:\n        problem",
        "    except FileNotFoundError as error:\n        problem",
        _CHECKS,
    ),
    (
        "verify/carried.py",
        "lengths = sorted({max(plain.rotary.trained_length // 2, 2), stock.rotary.usable_length})",
        "lengths = sorted({max(plain.rotary.trained_length // 2, 2)})",
        _CHECKS,
    ),
    ("checkpoint/families.py", 'for word in ("local", *family.sliding_types))', 'for word in ("local",))', _CHECKS),
    (
        "verify/carried.py",
        "                if change > _TOLERANCE:\n                    raise",
        "                if False:\n                    raise",
        _CHECKS,
    ),
    ("verify/carried.py", "(entry.scaling, scaling)]", "(1.0, 1.0)]", _CHECKS),
    ("verify/carried.py", "    if not after[lengths[0]]:", "    if False:", _CHECKS),
    (
        "verify/tensors.py",
        "is_trained = bool(training_of(subject)) and not gone and not added",
        "is_trained = bool(training_of(subject)) and not gone",
        _CHECKS,
    ),
    ("verify/clean_load.py", "        if error.signal:\n", "        if error.signal > 99:\n", _CHECKS),
    (
        "verify/checks_process.py",
        'f"{layer_type}_attention_scaling" if layer_type else "attention_scaling"',
        '"attention_scaling"',
        _CHECKS,
    ),
    ("verify/in_engine.py", "min(rotary.trained_length, reach)", "rotary.trained_length", _ENGINE),
    ("verify/in_engine.py", "sum(off) / len(off), at)", "sum(off) / len(off), at + 1)", _ENGINE),
    ("verify/in_engine.py", "return self.difference <= TOLERANCE", "return not self.difference > TOLERANCE", _ENGINE),
    (
        "data/encoding.py",
        "self._known[text] = ids\n        return",
        "self._known[text[:20]] = ids\n        return",
        _TEXTS,
    ),
    (
        "data/encoding.py",
        "return self._continued(left + right) == self._continued(left) + self._continued(right)",
        "return True",
        _TEXTS,
    ),
    ("data/encoding.py", "ends = [question.rfind(mark) + len(mark)", "ends = [question.find(mark) + len(mark)", _TEXTS),
    (
        "data/prompt.py",
        "key=lambda place: abs(ends[place] - depth * ends[-1])",
        "key=lambda place: abs(place - depth * len(units))",
        _TEXTS,
    ),
    (
        "data/records.py",
        'HELD_OUT = ("test", "validation", "train")',
        'HELD_OUT = ("validation", "test", "train")',
        _TEXTS,
    ),
    ("data/records.py", "stream if seed is None else stream", "stream if not seed else stream", _TEXTS),
    ("data/records.py", "if value is not None}", "}", _TEXTS),
    ("data/texts.py", "if len(ids) < length:", "if len(ids) <= length:", _TEXTS),
    ("data/texts.py", "documents.append(ids[:most])", "documents.append(ids[:length])", _TEXTS),
    ("data/texts.py", "size = length - len(start)", "size = length", _TEXTS),
    ("data/texts.py", 'f"{seed} prose {number}"', 'f"{seed} prose"', _TEXTS),
    ("data/prose.py", "        start = 0\n", "        pass\n", _TEXTS),
    ("data/prose.py", "rng.randrange(len(text))", "0", _TEXTS),
    ("data/prose.py", '_ARTICLE.sub(r"\\1n ", filled)', "filled", _TEXTS),
    ("system/loading.py", "% torch.cuda.device_count()", "% 1", _LOADING),
    ("system/loading.py", 'device.type != "cpu" or model', 'device.type == "cuda" or model', _LOADING),
    ("system/loading.py", "        logging.set_verbosity(level)\n", "", _LOADING),
    ("system/loading.py", ">= rows\n\n", "> rows\n\n", _LOADING),
    (
        "system/loading.py",
        "if (largest := int(given[0].max())) >= rows:",
        "if (largest := int(given[0][0].max())) >= rows:",
        _LOADING,
    ),
    (
        "system/loading.py",
        "        for place, name, original in originals:\n            setattr(place, name, original)\n",
        "        pass\n",
        _LOADING,
    ),
    ("recipes/code/staging.py", 'key.endswith(("_token_id", "_token_ids"))', 'key.endswith("_token_id")', _STAGING),
    ("recipes/code/staging.py", "weights |= {str(shard)", "weights = {str(shard)", _STAGING),
    (
        "recipes/code/staging.py",
        "    if missing := sorted(weights - {*names}):",
        "    if missing := sorted(weights - {*names})[:0]:",
        _STAGING,
    ),
    (
        "recipes/code/staging.py",
        "yield Staged(folder, trust=bool(code))",
        "yield Staged(folder, trust=bool(code), trust_tokenizer=bool(code))",
        _STAGING,
    ),
    (
        "recipes/code/staging.py",
        "ours = {auto: place for auto, place in auto_map.items() if f\"{str(place).partition('.')[0]}.py\" in code}",
        "ours = dict(auto_map)",
        _STAGING,
    ),
    (
        "recipes/code/staging.py",
        'for part in (loaded, getattr(loaded, "config", loaded)):',
        "for part in (loaded,):",
        _STAGING,
    ),
    (
        "checkpoint/opening.py",
        "if self.folder.resolve() in target.parents or",
        "if self.folder in target.parents or",
        _CHECKPOINT,
    ),
    ("checkpoint/opening.py", "_remote_sizes(source, revision, token)\n", "_remote_sizes(source, None, token)\n", _HUB),
    ("converters/lengths.py", "key == wanted and place is not None", "key == wanted and place == 0", _NUMBER),
    ("verify/engine.py", "stop_token_ids=list(ends)", "stop_token_ids=list(ends)[:1]", _ASKED),
    (
        "finetune/formats.py",
        "return {MESSAGES: messages, **tools}",
        "return {MESSAGES: messages}",
        ("tests/finetune/test_choices.py::test_records_in_our_own_fields",),
    ),
    (
        "finetune/probe.py",
        "max(0.0, (second - first)",
        "min(0.0, (second - first)",
        ("tests/finetune/test_choices.py::test_memory_at_another_length",),
    ),
    (
        "finetune/formats.py",
        '*([f"### Input:\\n{more}"] if more else [])',
        "",
        ("tests/finetune/test_choices.py::test_alpaca_s_wording_with_and_without_an_input",),
    ),
    (
        "finetune/mixture.py",
        "if kinds[is_long] and share > 0",
        "if kinds[is_long]",
        ("tests/finetune/test_choices.py::test_long_records_have_their_share_of_the_tokens",),
    ),
    (
        "finetune/run.py",
        ' if options.learn == "answers" else "every token")',
        ' if options.learn == "all" else "every token")',
        ("tests/finetune/test_choices.py::test_what_a_published_file_says_of_the_training",),
    ),
    (
        "finetune/prepare.py",
        "use_rslora=options.rslora,",
        "",
        ("tests/finetune/test_choices.py::test_every_choice_is_the_adapter_s",),
    ),
    (
        "search/eval_set.py",
        "size = -(-2 * len(self.documents) // len(starts))",
        "size = len(self.documents) // len(starts)",
        ("tests/search/test_decisions.py::test_parts_have_every_question_and_document_once",),
    ),
    (
        "search/loop.py",
        "rise > _FAR * self.options.keep_short or",
        "rise > self.options.keep_short or",
        ("tests/search/test_decisions.py::test_what_others_are_compared_with_is_asked_more",),
    ),
    (
        "search/loop.py",
        "if is_start:",
        "if not is_start:",
        ("tests/search/test_decisions.py::test_what_others_are_compared_with_is_asked_more",),
    ),
    (
        "search/run.py",
        "if out.exists() and not overwrite:",
        "if out.exists() and overwrite:",
        ("tests/search/test_decisions.py::test_where_a_recipe_may_be_written",),
    ),
    (
        "search/storage.py",
        "study_name=self.name, storage",
        "study_name=_FILE_NAME, storage",
        ("tests/search/test_decisions.py::test_studies_of_one_journal_are_told_apart",),
    ),
    (
        "evaluate/checkpoint_info.py",
        "token=token, original_length=original_length) for source",
        "token=token) for source",
        ("tests/evaluate/test_what_is_asked.py::test_names_and_digests_of_checkpoints",),
    ),
    (
        "evaluate/results_log.py",
        "if model != old_models[name]]",
        'if model["digest"] != old_models[name]["digest"]]',
        ("tests/evaluate/test_what_is_asked.py::test_only_the_same_run_is_gone_on_with",),
    ),
    (
        "evaluate/tasks/harness.py",
        "key=lambda word: (len(word), word)",
        "key=lambda word: word",
        ("tests/evaluate/test_what_is_asked.py::test_the_mean_of_ruler_is_named_by_what_was_run",),
    ),
    (
        "finetune/merge.py",
        "inherited=card_metadata(base.folder),",
        "inherited={},",
        ("tests/finetune/test_choices.py::test_cards_of_a_training_say_what_it_was_made_of",),
    ),
    (
        "finetune/merge.py",
        'name.split("/")[-1]',
        "name",
        ("tests/finetune/test_choices.py::test_the_card_of_an_adapter_says_how_its_base_was_made",),
    ),
    (
        "finetune/prepare.py",
        "base.model.encoding.first_index if takes_positions else None",
        "0 if takes_positions else None",
        ("tests/finetune/test_choices.py::test_positions_begin_where_the_family_begins_to_count",),
    ),
    (
        "evaluate/tasks/perplexity.py",
        "2 * reading.longest if reading.stride else reading.longest",
        "reading.longest",
        ("tests/evaluate/test_what_is_asked.py::test_documents_are_as_long_as_what_is_read_of_them",),
    ),
    (
        "portable/relation.py",
        'rules.last_rung(max(self.settings.get("target_length", rules.length), total))',
        'rules.last_rung(self.settings.get("target_length", rules.length))',
        (
            "tests/portable/test_relation.py"
            "::test_a_traced_plan_has_the_rungs_of_a_cache_that_is_longer_than_the_target",
        ),
    ),
    (
        "recipes/base.py",
        "return self.target_length or round(self.stretch * encoding.trained_length)",
        "return self.target_length or int(self.stretch * encoding.trained_length)",
        ("tests/recipes/test_proportions.py::test_the_reach_is_the_nearest_whole_number",),
    ),
    (
        "search/measurement.py",
        "[losses[-1]] * (len(self.lengths)",
        "[losses[0]] * (len(self.lengths)",
        ("tests/search/test_decisions.py::test_lengths_that_were_not_reached_count_as_the_longest_that_was",),
    ),
    (
        "search/study.py",
        "states=(TrialState.COMPLETE, TrialState.RUNNING))",
        "states=(TrialState.COMPLETE,))",
        ("tests/search/test_storage.py::test_a_recipe_that_is_being_tried_counts_among_the_trials",),
    ),
    (
        "cli/method_options.py",
        'step.pop("factor" if name == "target_length" else "target_length", None)',
        'step.pop("factor", None)',
        (
            "tests/recipes/test_recipe_files.py"
            "::test_how_far_to_reach_on_the_command_line_takes_the_place_of_the_file_s",
        ),
    ),
)
"""File, what stands there once, what to put in its place, and the tests that must fail then."""
