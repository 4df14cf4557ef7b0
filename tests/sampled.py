"""Which cases of the longest tests `make test` runs: a sample of each kind. `make thorough` runs the others, CI a part.

In SAMPLED, by file and test, a pattern that the ids of the kept cases contain; where it is "", none. What is left out
differs from a kept case in one word only: another family of the same kind, another chunk size, another layout of heads.
"""

import re
import zlib

import pytest

SAMPLED = {
    "canaries/test_canaries.py::test_a_converter_that_trusts_a_folder_finds_no_code": r"^tokenizer$",
    "canaries/test_canaries.py::test_custom_code_of_the_source_is_not_run": r"^(tokenizer|classes)$",
    "canaries/test_canaries.py::test_what_is_converted_verified_and_measured_stays_silent": "",
    "checkpoint/test_families.py::test_rope_types_are_those_that_take_effect": (
        r"^(llama|gemma3_text|gpt_neox|phi3|deepseek_v3|olmo3|gpt_oss|nanochat|llama4_text|modernbert-decoder)$"
    ),
    "checkpoint/test_families_inner_types.py::test_right_or_refused_by_name": (
        r"^(internvl|llava|mistral3|qwen3_vl|gemma3)-"
    ),
    "checkpoint/test_geometry_cache_sizes.py::test_the_estimated_cache_size_of_every_family_is_right": (
        r"^(llama|gemma2|gemma3_text|gemma3n_text|deepseek_v3|falcon|gpt_oss|jamba|llama4_text|mllama_text_model|mistral"
        r"|nemotron_h|phi3|qwen3_next|zamba2)$"
    ),
    "checkpoint/test_opening_hub.py::test_convert_from_the_hub": "forked",
    "checkpoint/test_other_files_sentence_encoders.py::test_a_table_with_fewer_trained_rows": r"^linear$",
    "cli/test_app_faults.py::test_streams_that_are_closed_full_or_of_few_signs": (
        r"^(demo|demo --json >&-|demo --json \| head -c 1|nothing 2>/dev/full)$"
    ),
    "converters/test_inspection.py::test_inspect_offers_what_converts": r"^\W*(llama|gemma3|hunyuan|cohere|granite)",
    "engines/test_row_wise.py::test_one_token_at_a_time": r"^(self-extend|dca|window|adaptive)-",
    "engines/test_row_wise.py::test_stored_rotated_keys_are_the_last_written": (r"^(self-extend|dca|window|adaptive)$"),
    "evaluate/test_run.py::test_killed_and_resumed_is_as_uninterrupted": "",
    "files/test_isolated.py::test_a_checkpoint_with_code_in_real_processes": "",
    "files/test_output_directory.py::test_many_converts_at_once_leave_one_result": "",
    "finetune/test_batches_masking.py::test_loss_and_gradients_equal_the_plain_forward": (
        r"^(albert|bert)-1-True$|^(camembert|distilbert)-1-False$|^(electra|longformer)-1000-True$"
        r"|^(roberta|xlm-roberta)-1000-False$"
    ),
    "finetune/test_finetune_command.py::test_interrupted_and_resumed": "",
    "finetune/test_loss.py::test_loss_and_gradients_equal_the_plain_forward": "-7-|^llama-",
    "finetune/test_run_stopping.py::test_sigterm_saves_the_last_whole_step": "^0$",
    "finetune/test_run_tables.py::test_skipped_positions_train_rows_that_short_windows_do_not": r"^(gpt2|roberta)$",
    "finetune/test_run_tables.py::test_the_table_is_trained_and_merged": r"^(gpt2|opt|bert|roberta)$",
    "merge/test_run_kinds.py::test_merged_equals_the_adapter": "^tied-|embedding|head|both",
    "merge/test_run_kinds.py::test_what_cannot_be_merged_is_refused_with_its_reason": "^tied-|rows",
    "models/test_answers_every_method.py::test_scored_is_written": (r"^(dynamic|yarn\+mspoe prompt|self-extend)$"),
    "portable/test_method_tensor_parallel.py::test_two_processes_give_the_logits_of_one": "",
    "portable/test_modeling_family_backends.py::test_compiled_without_a_graph_break": "",
    "portable/test_modeling_family_clients.py::test_continuous_batching": "",
    "portable/test_modeling_family_clients.py::test_every_client_writes_the_same": (
        r"^(calibrated|self-extend|dca|adaptive)-"
    ),
    "portable/test_modeling_family_padding.py::test_a_batch_writes_what_each_text_does_alone": (
        r"^1-|^2-(mspoe prompt|self-extend|dca|adaptive|distance-aware)$"
    ),
    "portable/test_modeling_family_padding.py::test_every_cell": (
        r"^(mspoe prompt|self-extend|dca|adaptive|distance-aware)-0$"
    ),
    "portable/test_modeling_family_padding.py::test_cells_within_the_original_length_equal_the_unmodified_model": (
        r"^(mspoe prompt|self-extend|dca|adaptive|distance-aware)-0$"
    ),
    "portable/test_modeling_family_padding.py::test_gaps_of_positions_are_the_same_to_one_call_and_to_a_cache": (
        r"^1-|^7-(mspoe prompt|self-extend|dca|sinks)$"
    ),
    "portable/test_modeling_family_padding.py::test_two_messages_of_a_chat": (
        r"^with the|^without it-(stock|mspoe prompt|self-extend|dca|adaptive)$"
    ),
    "portable/test_private_copy_callers.py::test_a_recorded_graph_has_no_levels_beyond_its_target": "",
    "portable/test_private_copy_callers.py::test_exported_at_any_length": "",
    "portable/test_private_copy_callers.py::test_recorded_by_torch_jit": r"^llama-(self-extend|mspoe prompt)$|^bloom-",
    "portable/test_private_copy_callers.py::test_replicas": r"^llama-|^gemma2-self-extend$|^bloom-",
    "portable/test_private_copy_callers.py::test_saved_and_copied": r"^llama-|^gemma2-self-extend$|^bloom-",
    "portable/test_private_copy_callers.py::test_threads": r"^llama-|^gemma2-self-extend$|^bloom-",
    "portable/test_relation.py::test_compiled_in_one_graph": r"dca-short|adaptive",
    "portable/test_relation.py::test_every_form_equals_loops": (
        r"-grouped$|^(self-extend|bifocal|dca|rerope|sinks|window|adaptive)-partial$"
    ),
    "recipes/test_frequencies_loaded.py::test_loaded_frequencies_equal_the_papers": r"-128-500000.0-131072$",
    "recipes/test_guards.py::test_it_is_refused_without_its_code_whichever_transformers_saved_it": (
        r"^(llama|gemma3_text|lfm2|bloom|falcon-rw)$"
    ),
    "recipes/test_registry_families.py::test_family": "^llama$",
    "recipes/test_table.py::test_a_family": (r"^(bart|bert|distilbert|gpt2|gpt_neo|opt|roberta)$"),
    "recipes/test_yarn_latent_attention.py::test_every_family_that_reads_the_key": (
        r"^(deepseek_v3|bailing_hybrid|longcat_flash|youtu)$"
    ),
    "search/test_final_evaluation.py::test_the_time_limit_includes_all_stages": "",
    "search/test_run.py::test_a_killed_search_resumes_with_the_same_result": "",
    "search/test_run.py::test_the_demo_gets_a_recipe_file_that_converts": "",
    "search/test_run.py::test_the_same_seed_and_trials_give_the_same_recipe": "",
    "search/test_storage.py::test_a_journal_is_resumed_and_replaced": "",
    "search/test_storage_at_once.py::test_four_create_a_study": r"^(sqlite|journal)$",
    "search/test_trial_model.py::test_applied_is_converted_and_loaded": r"^(llama|deepseek_v3)$",
    "served/test_verdict.py::test_a_cut_that_only_the_count_shows": r"^True$",
    "served/test_verdict.py::test_a_server_that_samples": "",
    "served/test_verdict.py::test_a_wrong_reading": r"temperature$",
    "served/test_verdict.py::test_noise_of_8_bits": "",
    "served/test_verdict.py::test_other_weights": "",
    "served/test_verdict.py::test_prompts_that_are_cut": r"^True$",
    "served/test_verdict.py::test_templates": "",
    "served/test_verdict.py::test_text_and_no_log_probabilities": "",
    "server/test_client_malformed.py::test_every_kind": "",
    "tasks/test_documents_several_questions.py::test_answers_on_one_reading_are_those_of_generate": r"^2-",
    "tasks/test_nolima_babilong.py::test_prompts_of_different_lengths_are_written_one_by_one": "",
    "tasks/test_perplexity_encoders.py::test_who_guesses_is_right_by_chance": "",
    "test_architecture.py::test_the_tests_of_a_file_are_those_that_import_it": r"push",
    "test_redaction.py::test_no_command_shows_a_token": "^(convert|eval)$",
    "verify/test_forms_process_faults.py::test_a_fault_in_one_form_is_seen": r"-(rerope|window)$",
    "verify/test_forms_process_faults.py::test_convert_and_verify_refuse_a_fault_of_one_form": "",
    "verify/test_forms_process_faults.py::test_every_form_of_the_right_code_equals_the_reference": (
        r"^(self-extend|dca|mspoe|adaptive)$"
    ),
    "verify/test_isolated_checks.py::test_a_faulty_reference_is_not_reported_as_a_faulty_model": r"^change0-",
    "verify/test_isolated_checks_decoding.py::test_code_that_finds_no_cache_is_refused": r"^ntk-alibi$",
    "verify/test_isolated_checks_decoding.py::test_whole_models_that_number_the_columns_decode_padded_rows": (
        r"^gemma4_unified$"
    ),
    "verify/test_isolated_checks_far.py::test_one_position_that_is_wrong_is_seen_and_nothing_right_refused": (
        r"^(self-extend|adaptive)-1048576$|^bifocal-8192$"
    ),
    "verify/test_run_values.py::test_no_value_changes_unseen": r"-llama$",
}


def mark(item: pytest.Item) -> None:
    """Mark a test that is not in its sample."""
    name, _, case = item.nodeid.removeprefix("tests/").partition("[")
    kept = SAMPLED.get(name)
    if kept is not None and not (kept and re.search(kept, case.removesuffix("]"))):
        item.add_marker(pytest.mark.thorough)


def is_in_part(item: pytest.Item, part: str) -> bool:
    """Return whether a test is in the K-th of N parts, "K/N"; quick tests are in each."""
    which, parts = map(int, part.split("/"))
    left_out = item.get_closest_marker("thorough") or item.get_closest_marker("slow")
    return not left_out or zlib.crc32(item.nodeid.encode()) % parts == which
