"""Script of `isolated_checks.py` for a process without ctxext: run one of `CHECKS`, such as the comparison of logits.

Its argument is the path of a JSON file with the task. Its last line of output is a JSON object with the result.
The task of `compare` has `folder`, the checkpoint; `stock`, the config.json of the same model without code; `steps`,
the settings of each method; and `positions`. The expected logits are computed on the stock model of the family, one
head and one row at a time, without the code of the checkpoint.

If a method changes distances, logits reveal little: random weights attend almost evenly, trained ones to a few tokens,
and a rounding error in the first layer may grow a hundredfold through thirty layers. So the output of each attention is
compared separately, twice: on the states of the model, where the reference continues with the output of the
checkpoint, and on states of known spread (`Samples`), the same in both models.
"""

import contextlib
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .decoding_process import compare_decoding, explain_decoding, is_as_wrong, is_wrong
from .encodings_process import compare_buckets, compare_memory, compare_slopes, compare_tables, differences
from .expected_process import CannotBeMovedError, Expected, Samples, largest_difference, run_and_record
from .forms_process import Text, compare_forms, expected_outputs, replace_states, run_forms
from .model_process import LOADED, backend_of, load, load_stock
from .references import REFERENCES

LEARNED = ".distance.weight"


def learned_weights(model: Any, info: dict[str, Any], earlier: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the weights of methods by the name of the attention, after replacing zeros by random numbers.

    If `earlier` is set, they are replaced by these weights of the same model.

    Raises:
        ValueError: the weights in the files have other names than the model's.
    """
    lost = [name for key in ("missing_keys", "unexpected_keys") for name in info[key] if name.endswith(LEARNED)]
    if lost:
        raise ValueError(f"{lost[0]} has another name in the model.")
    weights = {}
    for name, weight in model.named_parameters():
        if name.endswith(LEARNED):
            with torch.no_grad():
                if earlier is not None:
                    weight.copy_(torch.tensor(earlier[name.removesuffix(LEARNED)]))
                elif not weight.any():
                    weight.copy_(torch.randn_like(weight))
            weights[name.removesuffix(LEARNED)] = weight.detach().tolist()
    return weights


def compare(task: dict[str, Any]) -> dict[str, Any]:
    """Load a checkpoint and compare its logits with the references; `refused` is the reason if that is impossible."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)  # A checkpoint has the same result in each run.
    out, positions = Path(task["folder"]), torch.tensor([task["positions"]])
    text = AutoConfig.from_pretrained(out, trust_remote_code=True).get_text_config()
    # The sdpa of transformers 4.57 omits the cap on scores (Gemma 2), and Doge's without padding reads later tokens.
    is_inexact = getattr(text, "attn_logit_softcapping", None) or text.model_type == "doge"
    exact = {"attn_implementation": "eager"} if is_inexact else {}
    options = {"trust_remote_code": True, "dtype": torch.float32, "output_loading_info": True, **exact}
    loaded, info = AutoModelForCausalLM.from_pretrained(out, **options)
    loaded.eval()
    # Weights of a method that were not trained are zero, and the method has no effect with them.
    task["numbers"] = learned_weights(loaded, info)
    input_ids = torch.randint(0, loaded.config.get_text_config().vocab_size, positions.shape)
    mask = torch.ones_like(input_ids)

    def run(model: Any) -> Any:
        return model(input_ids, attention_mask=mask, position_ids=positions, use_cache=False).logits

    logits, outputs = run_and_record(loaded, functools.partial(run, loaded))
    # Only methods that change distances need the comparison of attention outputs.
    moves = any(hasattr(REFERENCES[step["method"]], "relation") for step in task["steps"])
    own = Samples(loaded, len(task["positions"]))
    if moves:
        with replace_states(loaded, own):
            outputs_of_samples = run_and_record(loaded, functools.partial(run, loaded))[1]
    # The forms are run before the unmodified model is loaded, so that memory contains one model at a time.
    texts, current = [Text(**text) for text in task["forms"]], task["steps"]
    forms, decoding = list[Any](), dict[str, Any]()
    for steps in [*(text.steps for text in texts), task["decoding"]]:
        if steps != current:  # Methods read their settings while the model is built.
            del loaded
            config = AutoConfig.from_pretrained(out, trust_remote_code=True)
            config.get_text_config().ctxext_code["steps"] = current = steps
            loaded, info = AutoModelForCausalLM.from_pretrained(out, config=config, **options)
            learned_weights(loaded.eval(), info, task["numbers"])  # Loading sets them to the zeros of the files.
        if len(forms) < len(texts):
            forms.append(run_forms(loaded, texts[len(forms)]))
        if steps == task["decoding"] and not decoding:
            decoding = compare_decoding(loaded, steps)
    backend = backend_of(loaded)
    del loaded
    print(LOADED, flush=True)  # noqa: T201
    # Eager attention has a mask of scores, which `Expected.attend` adds to those of the references.
    stock = load_stock(out, task["stock"], attn_implementation="eager")
    unchanged, _ = run_and_record(stock, functools.partial(run, stock))
    expected = Expected(stock, task)
    attention = 0.0
    try:
        # Each layer continues with the checkpoint's output, so that a rounding error does not grow through the layers.
        expected_logits, expected_of_states = run_and_record(
            stock, lambda: expected.logits(input_ids, positions), outputs if moves else None
        )
        if moves:
            expected_of_samples = expected.outputs(Samples(stock, len(task["positions"])), positions)
            pairs = [*outputs, *outputs_of_samples], [*expected_of_states, *expected_of_samples]
            attention = largest_difference(*pairs)
        by_form, unusable = check_forms(expected, texts, forms, backend)
    except CannotBeMovedError as error:
        return {"refused": str(error)}
    return {
        **differences(logits, unchanged, expected_logits),
        "attention": attention,
        "forms": by_form,
        "unusable": unusable,
        "decoding": explain_decoding(decoding, stock),
    }


def check_forms(
    expected: Expected, texts: list[Text], forms: list[Any], backend: str
) -> tuple[dict[str, Any], list[str]]:
    """Return the largest difference or the error of each form, and the forms that are wrong without methods too.

    Examples of these: some caches keep fewer keys than the mask shows (Moshi), and some masks of a prompt after others
    leave out the earlier ones (MiniMax).
    """
    model, results, unusable = expected.model, dict[str, Any](), dict[str, None]()
    with contextlib.suppress(ValueError):  # Without eager attention's mask of pairs; not every family has another one.
        model.set_attn_implementation(backend)
    for text, outputs in zip(texts, forms, strict=True):
        num_texts = 1 if text.is_alone else 2
        found = compare_forms(outputs, expected_outputs(expected, text, num_texts), text)
        if any(map(is_wrong, found.values())):  # Otherwise the unmodified model need not run all forms.
            right = expected_outputs(expected, text, num_texts, is_stock=True)
            unchanged = compare_forms(run_forms(model, text), right, text)
            # After an error, the later calls of a way have no results, and the error has the name of the way.
            of_way = {name: unchanged.get(name.partition(" (")[2].removesuffix(")"), 0.0) for name in found}
            as_stock = [name for name in found if is_as_wrong(found[name], unchanged.get(name, of_way[name]))]
            unusable |= dict.fromkeys(as_stock)
            found = {name: value for name, value in found.items() if name not in as_stock}
        for name, difference in found.items():
            both = [difference, results.get(name, difference)]
            errors = [each for each in both if isinstance(each, str)]
            results[name] = errors[0] if errors else torch.tensor(both).max().item()  # Python's max would lose NaN.
    return results, list(unusable)


CHECKS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "load": load,
    "tables": compare_tables,
    "buckets": compare_buckets,
    "memory": compare_memory,
    "slopes": compare_slopes,
    "logits": compare,
}


if __name__.endswith("__main__"):
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sys.stdout.write(json.dumps(CHECKS[task["check"]](task)) + "\n")
