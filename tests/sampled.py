"""Which cases of the longest tests `make test` runs: a sample of each kind. `make thorough` runs the others, CI a part.

In SAMPLED, by file and test, a pattern that the ids of the kept cases contain. What is left out differs from a kept
case in one word only: another family of the same kind, another chunk size, another layout of heads. The cases of one
test take less than a second together; a longer test without cases is marked `thorough` where it is written.
"""

import re
import zlib

import pytest

SAMPLED = {
    "canaries/test_canaries.py": {
        "test_custom_code_of_the_source_is_not_run": "^tokenizer$",
    },
    "checkpoint/test_families.py": {
        "test_defaults_are_those_of_the_class": "^[a-g]",
        "test_rope_types_are_those_that_take_effect": "^(llama|gemma3_text|phi3|gpt_oss|llama4_text)$",
        "test_values_are_read_like_those_of_transformers": "^[g-p]",
    },
    "checkpoint/test_families_inner_types.py": {
        "test_right_or_refused_by_name": "^(internvl|llava|mistral3|qwen3_vl|gemma3)-",
    },
    "checkpoint/test_families_multimodal.py": {
        "test_a_family": "^qwen3_vl$",
    },
    "checkpoint/test_geometry_cache_sizes.py": {
        "test_the_estimated_cache_size_of_every_family_is_right": (
            "^(llama|gemma2|gemma3_text|gemma3n_text|deepseek_v3|falcon|gpt_oss|jamba|llama4_text"
            "|mllama_text_model|mistral|nemotron_h|phi3|qwen3_next|zamba2)$"
        ),
    },
    "checkpoint/test_head.py": {
        "test_the_loss_of_every_causal_family": (
            "^(llama|gemma3_text|gpt2|bloom|gpt_neox|cohere|granite|jamba|phi3|deepseek_v3|gpt_oss|mamba2|qwen2_vl)$"
        ),
        "test_the_loss_of_every_masked_family": "^(bert|roberta|modernbert)$",
    },
    "checkpoint/test_loading_described.py": {
        "test_verify_names_it_once": "^method0$",
        "test_whole_checkpoints_of_every_family_are_accepted_and_others_are_not": "-(llama|gemma3|modernbert|mixtral)$",
    },
    "checkpoint/test_opening_hub.py": {
        "test_convert_from_the_hub": "forked",
    },
    "cli/test_app_faults.py": {
        "test_streams_that_are_closed_full_or_of_few_signs": "^demo( --json >&-)?$",
        "test_whatever_is_raised_is_one_line_and_no_traceback": "ValueError|hub_token|check_sizes",
    },
    "cli/test_options_completion.py": {
        "test_a_shell_is_offered_values": "^ctxext mer",
    },
    "converters/test_card.py": {
        "test_a_report_of_another_form_is_refused_in_one_line": "change[0137]$",
        "test_the_command_of_a_card_makes_the_same_checkpoint": r"^(rerope|yarn|adaptive|table|longrope|mspoe)\b",
    },
    "converters/test_inspection.py": {
        "test_inspect_offers_what_converts": r"^\W*(llama|gemma3|hunyuan|cohere|granite)",
        "test_published_models_are_offered_what_can_be_planned": "0$",
    },
    "engines/test_row_wise.py": {
        "test_keys_are_rotated_again_after_a_change_of_frequencies": "^(self-extend|dca|sinks)$",
        "test_one_token_at_a_time": "^(self-extend|dca)-Imp",
        "test_stored_rotated_keys_are_the_last_written": "^self-extend$",
    },
    "evaluate/test_run.py": {
        "test_lines_of_another_form_end_a_resumed_run_in_one_line_or_are_left_out": "^change[01]$",
        "test_the_source_is_known_by_its_content_and_not_by_its_name": "^recorded-beside$",
    },
    "files/test_strict.py": {
        "test_only_regular_files_are_read": "^config.json-pipe$",
    },
    "finetune/test_batches_masking.py": {
        "test_loss_and_gradients_equal_the_plain_forward": (
            "^(albert|bert)-1-True$|^(camembert|distilbert)-1-False$|^(electra|longformer)-1000-True$"
            "|^(roberta|xlm-roberta)-1000-False$"
        ),
    },
    "finetune/test_chats_fields.py": {
        "test_a_flag_selects_the_messages_to_learn": "-1-",
    },
    "finetune/test_documents_mixture.py": {
        "test_a_short_run_sees_many_documents": "^restart$",
    },
    "finetune/test_loss.py": {
        "test_loss_and_gradients_equal_the_plain_forward": "-7-|^llama-",
    },
    "finetune/test_loss_keep_short.py": {
        "test_the_source_speaks_again_without_its_files": "-steps0$",
    },
    "finetune/test_low_memory.py": {
        "test_tiles_have_the_same_loss_and_gradients": "^(llama|mixtral)-",
    },
    "finetune/test_run.py": {
        "test_a_damaged_save_is_reported_in_one_line": "^rng_state",
    },
    "finetune/test_run_tables.py": {
        "test_all_weights_of_a_model_with_a_table": "^gpt2$",
        "test_the_table_is_trained_and_merged": "^roberta$",
    },
    "finetune/test_saves.py": {
        "test_a_resumed_run_ends_as_an_uninterrupted_one": "^other folder$",
        "test_an_unusable_save_is_skipped_and_the_one_before_is_used": " (folder|missing)$",
    },
    "fuzz/test_fuzz_tasks.py": {
        "test_a_malformed_file_is_one_clear_line": "[02468]$",
    },
    "gguf/test_convert.py": {
        "test_first_parts_and_parts_of_another_run_are_not_mixed": "interrupted$",
    },
    "gguf/test_eval.py": {
        "test_scores_that_are_no_numbers_are_refused": "NaN$",
    },
    "merge/test_run_kinds.py": {
        "test_merged_equals_the_adapter": "^tied-(dora|orthogonal|embedding|head whole)$|^untied-embedding whole$",
        "test_what_cannot_be_merged_is_refused_with_its_reason": "^tied-|rows",
    },
    "models/test_reading.py": {
        "test_losses_and_generated_tokens_of_pieces_equal_those_of_whole_prompts": "^(gemma3_text|llama4_text)$",
        "test_prompts_on_a_shared_cache_equal_whole_prompts": "^(gemma3_text|falcon_h1)$",
    },
    "models/test_loading.py": {
        "test_a_class_of_tokenizers_that_is_none_is_one_line": r"^(a\.b|NoSuchTokenizer|RagTokenizer)$",
    },
    "models/test_server_model.py": {
        "test_the_same_score_as_in_transformers": "^options1$",
    },
    "portable/test_modeling_family.py": {
        "test_a_model_for_images_and_text_loads_with_the_method": "^qwen3_5$",
    },
    "portable/test_modeling_family_bidirectional.py": {
        "test_it_is_refused_by_name": "^(self-extend|dca)-",
    },
    "portable/test_modeling_family_clients.py": {
        "test_every_client_writes_the_same": "^self-extend-|^calibrated-prefill",
    },
    "portable/test_modeling_family_masks.py": {
        "test_a_mask_without_the_starts_of_texts_is_refused": "^(self-extend|dca|adaptive)$",
        "test_eager_attention_adds_numbers": "^mspoe middle$",
        "test_every_cell": "^mspoe calibrated$",
    },
    "portable/test_modeling_family_padding.py": {
        "test_a_batch_writes_what_each_text_does_alone": "^1-(mspoe prompt|self-extend)$|^2-dca$",
        "test_a_cache_is_cropped_and_copied_behind_a_hole": "^(self-extend|mspoe prompt)$",
        "test_cells_within_the_original_length_equal_the_unmodified_model": "^(dca|mspoe prompt)-0$",
        "test_every_cell": "^(dca)-0$",
        "test_gaps_of_positions_are_the_same_to_one_call_and_to_a_cache": (
            "^1-(mspoe prompt|self-extend|dca|sinks)$|^7-self-extend$"
        ),
        "test_some_cells_of_other_families": "^qwen3-sinks$",
        "test_two_messages_of_a_chat": "-(mspoe prompt|self-extend)$",
    },
    "portable/test_mspoe_generation.py": {
        "test_cached_is_uncached_with_the_same_order": "^pieces[12]-static$|^pieces2-dynamic$",
    },
    "portable/test_mspoe_schedules.py": {
        "test_a_ratio_composes_with_any_base": "^(default|yarn|longrope)$",
        "test_ratio_1_changes_nothing_on_any_base": "^(yarn|longrope|dynamic)-ntk",
    },
    "portable/test_private_copy_callers.py": {
        "test_recorded_by_torch_jit": "^llama-(self-extend|mspoe prompt)$|^bloom-",
        "test_renamed_arguments_are_found_or_refused": (
            "^(self-extend|mspoe prompt)-(cache|position_ids|attention_mask)$"
        ),
        "test_replicas": "^llama-|^gemma2-self-extend$|^bloom-",
        "test_saved_and_copied": "^llama-(self-extend|mspoe prompt|window)$|^gemma2-self-extend$",
        "test_threads": "^llama-(self-extend|mspoe prompt)$|^gemma2-self-extend$|^bloom-",
    },
    "portable/test_relation.py": {
        "test_a_long_call_leaves_queries_within_the_original_length_unchanged": "^1(100|700)-dtype0",
        "test_bfloat16": "^(self-extend|dca|adaptive|window-warm)$",
        "test_every_form_equals_loops": "^(self-extend|adaptive)-(grouped|partial)$|^dca-short-grouped$",
        "test_gradients": "^(self-extend|dca-short|adaptive)$",
        "test_left_padding_in_every_kind_of_mask": "^(self-extend|window-short)$",
    },
    "recipes/test_buckets.py": {
        "test_a_family": "^(t5|umt5)$",
    },
    "recipes/test_declare.py": {
        "test_a_family": "^(jamba|smollm3)$",
        "test_a_window_beyond_the_original_length_is_named": "^64-",
        "test_verify_loads_it_and_compares_the_rotation": "^jamba$",
    },
    "recipes/test_frequencies_loaded.py": {
        "test_loaded_frequencies_equal_the_papers": r"^(pi|yarn|longrope)-128-500000\.0-131072$",
    },
    "recipes/test_guards.py": {
        "test_it_is_refused_without_its_code_whichever_transformers_saved_it": "^bloom$",
        "test_other_heads_read_by_the_method_too": "^(llama|bloom)-Seq|^qwen3-Tok",
    },
    "recipes/test_ntk_alibi.py": {
        "test_a_fault_in_one_form_is_refused": "^falcon-",
        "test_the_logits_are_the_papers": "^bloom-.*static$",
    },
    "recipes/test_registry_references.py": {
        "test_neutral_numbers_change_nothing": "^(mspoe|self-extend|yarn|longrope|table|declare|buckets|memory)$",
    },
    "recipes/test_rotary_encoders.py": {
        "test_global_layers_change_and_local_ones_stay": "^modernbert$",
    },
    "recipes/test_rotary_layers.py": {
        "test_each_layer_from_its_own_base": r"^\W*500000\.0, 10000\.0, 20000\.0.*granite_swa",
        "test_each_layer_type_keeps_its_own_entry": "^(gemma3|gemma4|mellum|modernbert)$",
    },
    "recipes/test_rotary_null_and_absent.py": {
        "test_null_absent_and_default_are_read_as_the_class_reads_them": "^apertus$",
    },
    "recipes/test_rotary_published_configurations.py": {
        "test_a_few": "pythia-14m|CodeLlama-13b|gpt-oss",
    },
    "recipes/test_rotary_published_schedules.py": {
        "test_hunyuan_is_converted_from_its_true_base": "^hunyuan_v1_dense-(yarn|pi)$|^hunyuan_v1_moe-ntk$",
    },
    "recipes/test_rotary_trained_schedules.py": {
        "test_longrope_passes_the_check_after_converting": "^mspoe$",
        "test_what_changes_nothing_is_bit_equal_on_a_trained_schedule": "-(mspoe)$",
        "test_what_lengthens_a_trained_schedule_is_bit_equal_inside": "^(phi-3-128k|gpt-oss)-self-extend$",
    },
    "recipes/test_table.py": {
        "test_a_computed_table": "float32$",
        "test_a_family": "^(bert|gpt2|opt|roberta)$",
        "test_a_fill_matches_its_reference": "float16$",
    },
    "recipes/test_yarn_latent_attention.py": {
        "test_every_family_that_reads_the_key": "^deepseek_v3$",
    },
    "search/test_trial_model.py": {
        "test_applied_is_converted_and_loaded": "^deepseek_v3$",
    },
    "served/test_every_token.py": {
        "test_one_prompt_that_differs_fails_all": "^numbers[05]$",
    },
    "server/test_answers.py": {
        "test_a_refused_length_in_other_words": "^error-400-.*-(0|512)$",
    },
    "tasks/test_mrcr_graphwalks.py": {
        "test_a_layout_is_what_the_template_renders": "^(gemma4|gptoss|llama3_1|qwen3|nemotron_3_ultra|gemma3)$",
        "test_prompts_are_exact_and_the_same_for_the_same_seed": "^qwen3$",
        "test_the_conversation_is_that_of_the_data_set": "^mrcr-2$",
    },
    "tasks/test_passages.py": {
        "test_chunks_find_what_lies_behind_the_cut": "^task0$",
    },
    "tasks/test_published.py": {
        "test_all_nothing_and_half": "^(ruler-cwe|mrcr-flat-8|ruler-qa-1|niah-multikey-3|niah-multivalue)$",
        "test_lists_of_words_fill_every_length_and_have_one_answer": "^ruler-fwe$",
        "test_the_reported_noise_floor_covers_all_texts": "^mrcr-flat",
        "test_the_requested_text_is_the_nth_of_its_kind": "^mrcr-flat-2$",
    },
    "tasks/test_registry_options.py": {
        "test_tasks_declare_the_options_that_change_their_prompts": "^repeat_question$",
    },
    "tasks/test_retrieval.py": {
        "test_all_none_and_half": "^association-False$",
    },
    "tasks/test_ruler.py": {
        "test_prompts_are_what_the_rules_make_of_their_words": "-900$",
    },
    "test_api.py": {
        "test_a_function_and_a_package_of_one_name": (
            r"^(compare-import ctxext\.\{0\}|evaluate-import ctxext\.\{0\}\.run)$"
        ),
    },
    "verify/test_forms_process_faults.py": {
        "test_every_form_of_the_right_code_equals_the_reference": "^mspoe$",
    },
    "verify/test_isolated_checks_far.py": {
        "test_one_position_that_is_wrong_is_seen_and_nothing_right_refused": "^adaptive-1048576$",
        "test_tokens_are_at_the_borders_of_rules": "^(self-extend|dca|window)$",
    },
    "verify/test_rotary_classes.py": {
        "test_answered_as_the_class_answers": "^(yarn|longrope|abf|dynamic)$",
    },
    "verify/test_run_values.py": {
        "test_no_value_changes_unseen": "^recorded-llama$",
    },
}


def mark(item: pytest.Item) -> None:
    """Mark a test that is not in its sample."""
    file, _, test = item.nodeid.removeprefix("tests/").partition("::")
    name, _, case = test.partition("[")
    kept = SAMPLED.get(file, {}).get(name)
    if kept is not None and not re.search(kept, case.removesuffix("]")):
        item.add_marker(pytest.mark.thorough)


def is_in_part(item: pytest.Item, part: str) -> bool:
    """Return whether a test is in the K-th of N parts, "K/N"; quick tests are in each."""
    which, parts = map(int, part.split("/"))
    left_out = item.get_closest_marker("thorough") or item.get_closest_marker("slow")
    return not left_out or zlib.crc32(item.nodeid.encode()) % parts == which
