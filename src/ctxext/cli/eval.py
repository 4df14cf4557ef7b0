"""`ctxext eval`: does a model use its context, and what did extending it cost?"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ctxext.cli import eval_options as own
from ctxext.cli.options import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    OriginalLengthOption,
    QuietOption,
    RevisionOption,
    TokenOption,
    VerboseOption,
    length_in,
    names_in,
)
from ctxext.cli.output import Output
from ctxext.converters.output_directory import full_disk_told
from ctxext.errors import CtxextError

if TYPE_CHECKING:
    from ctxext.evaluate.report.report import Report


def eval_(
    models: own.ModelsArgument,
    *,
    task: own.TaskOption = None,
    lengths: own.LengthsOption = None,
    depths: own.DepthsOption = "5",
    samples: own.SamplesOption = 20,
    seed: own.SeedOption = 0,
    allow_beyond: own.AllowBeyondOption = False,
    original_length: OriginalLengthOption = None,
    needles: own.NeedlesOption = 4,
    kv_ids: own.KvIdsOption = "uuid",
    haystack: own.HaystackOption = None,
    documents: own.DocumentsOption = None,
    data: own.DataOption = None,
    stride: own.StrideOption = None,
    harness: own.HarnessOption = None,
    generate: own.GenerateOption = False,
    chat_template: own.ChatTemplateOption = True,
    batch_size: own.BatchSizeOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    attention: own.AttentionOption = None,
    trust_remote_code: own.TrustOption = False,
    engine: own.EngineOption = "transformers",
    engine_args: own.EngineArgumentsOption = None,
    out: own.OutOption = None,
    resume: own.ResumeOption = False,
    overwrite: own.OverwriteOption = False,
    revision: RevisionOption = None,
    token: TokenOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Measure whether models find things anywhere in their context, and what extending it cost.

    Examples:
    ctxext eval demo demo-yarn-2k --task needle,short --lengths 512,2k --allow-beyond

    ctxext eval my-model --task needle,kv --lengths 4k,32k --depths 11 --out report --resume

    ctxext eval my-model --engine vllm --task needle,kv --lengths 4k,32k
    """
    from ctxext.evaluate.model import Loading
    from ctxext.evaluate.plan import default_tasks
    from ctxext.evaluate.run import evaluate
    from ctxext.evaluate.settings import Settings, parse_depths
    from ctxext.reading.strict import parse_json
    from ctxext.recipes.length import parse_length

    output = Output(as_json=as_json, quiet=quiet, verbose=verbose)
    arguments = parse_json(engine_args, "--engine-args") if engine_args else {}
    if not isinstance(arguments, dict):
        raise CtxextError("--engine-args is no JSON object.", hint="""Write '{"tensor_parallel_size": 2}'.""")
    loading = Loading(device, dtype, attention, chat_template, trust_remote_code, revision, token, engine, arguments)
    usual = own.WRITTEN_TASKS if engine == "vllm" else ()
    settings = Settings(
        tasks=names_in(task) or usual or default_tasks(models, loading),
        lengths=tuple(sorted({parse_length(word) for word in names_in([lengths or ""])})),
        depths=parse_depths(depths),
        samples=samples,
        seed=seed,
        num_needles=needles,
        kv_ids=kv_ids,
        haystack=haystack,
        data=data,
        documents=documents,
        stride=stride,
        generate=generate,
        allow_beyond=allow_beyond,
        batch_size=batch_size,
        harness=names_in([harness or ""]),
        original_length=length_in(original_length),
    )
    out = out or _free_folder(resume=resume)
    with full_disk_told(out), output.progress("evaluating") as progress:
        report = evaluate(
            models, settings, loading=loading, out=out, resume=resume, overwrite=overwrite, progress=progress
        )
    if report:
        _tell(report, out, models, output)


def _free_folder(*, resume: bool) -> Path:
    """A folder that is not there yet."""
    from ctxext.evaluate.processes import num_processes

    if resume or num_processes() > 1:
        raise CtxextError("Which results are meant?", hint="Name their folder with --out.")
    number, folder = 1, Path("report")
    while folder.exists():
        number += 1
        folder = Path(f"report-{number}")
    return folder


def _tell(report: "Report", out: Path, models: Sequence[str], output: Output) -> None:
    """Print the tables, what they say, and where the rest is."""
    from rich.text import Text

    from ctxext.cli.eval_tables import report_tables
    from ctxext.evaluate.report.findings import findings

    if report.get("skipped_lines"):
        output.warning(f"{report['skipped_lines']} lines of {out} are torn or not of this run; they were left out.")
    for model in report["models"]:
        if model.get("mind"):
            output.warning(f"{model['name']} in {model['engine']}: {model['mind']}.")
    sentences = [Text(sentence) for sentence in findings(report)]
    output.result(report, *report_tables(report, output.stdout.width), Text(), *sentences)
    computed = {f"{model.get('dtype')} on {model.get('device')}" for model in report["models"] if model.get("dtype")}
    output.note(Text(f"Computed in {', '.join(sorted(computed))}. Pictures and tables: {out / 'report.html'}"))
    if not any(model["recipe"] for model in report["models"]):
        method = "yarn" if report["models"][0]["kind"] == "causal" else "table"
        output.next_step("ctxext", "convert", models[0], "--method", method, "--factor", 4, why="Extend it")
        return
    lost = [model["name"] for model in report["models"] if model["recipe"]]
    output.next_step("ctxext", "finetune", lost[0], "OUT", why="A short fine-tune helps most methods")
