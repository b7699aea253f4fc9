"""``llama-jax lm-eval``: the tasks of the lm-evaluation-harness."""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

import llama_jax
from llama_jax.cli.options import FormatOption, LoadOptions, ModelPath, SingleAdapterOption
from llama_jax.cli.terminal import print_status, printable
from llama_jax.errors import UserError, short_repr
from llama_jax.settings import at_least
from llama_jax.storage.atomic_write import write_atomically
from llama_jax.tokenizers import resolve_format

if TYPE_CHECKING:
    from llama_jax.evaluation.text_model import TextModel


@dataclass(frozen=True, kw_only=True)
class LmEval(FormatOption, SingleAdapterOption, LoadOptions):
    """Run tasks of the lm-evaluation-harness on a model, without torch, and print the scores.

    For a task of your own, --include-path is the folder of its .yaml, whose data_files may be local. The harness downloads
    other tasks. Needs the extra 'lm-eval'.
    """

    SHOWN_FIRST = ("model", "tasks", "num_fewshot", "limit", "batch")

    model: tyro.conf.Positional[Annotated[ModelPath, tyro.conf.arg(metavar="PATH")]] = field()  # none by default
    """Folder or file of a model, in any supported format."""
    tasks: Annotated[str, tyro.conf.arg(metavar="TASK,...")]
    """Names of tasks or groups, for example arc_easy,hellaswag; * matches any characters."""
    include_path: Path | None = None
    """A folder with .yaml files of your own tasks."""
    num_fewshot: Annotated[int, at_least(0)] | None = None
    """Number of examples before each question. The default is the task's."""
    limit: float | None = None
    """Use only the first questions of each task: a number, or a fraction below 1. For trials, not for reported results."""
    batch: Annotated[int, at_least(1)] | None = None
    """Rows of a batch. The default is 1 for scoring on a CPU, whose caches hold no more, 8 for scoring elsewhere, and 16 for
    generation."""
    apply_chat_template: bool = False
    """Ask each question as a user message in the model's chat format."""
    fewshot_as_multiturn: Annotated[bool, tyro.conf.arg(help_behavior_hint="")] = True
    """With --apply-chat-template: put all examples into one message. By default each is its own turn."""
    system: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None
    """System prompt."""
    bos: Annotated[bool, tyro.conf.arg(help_behavior_hint="")] = True
    """Omit the begin-of-sequence token. By default it is added if the tokenizer adds it to texts."""
    seed: int = 0
    """Random seed of tasks that sample; most are greedy."""
    output: Path | None = None
    """Write all results to this file, as a JSON object."""
    samples: bool = False
    """With --output: include every question and the model's answer."""
    overwrite: bool = False
    """Replace the file of --output."""

    def run(self) -> None:
        started = time.perf_counter()
        self._check()
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        tasks, manager = self._find_tasks()
        self.start_jax()
        import lm_eval

        from llama_jax.evaluation.lm_eval_adapter import HarnessModel

        texts = self._texts()
        try:
            results = lm_eval.simple_evaluate(
                model=HarnessModel(texts, str(self.model)),
                tasks=tasks,
                task_manager=manager,
                num_fewshot=self.num_fewshot,
                limit=self.limit,
                apply_chat_template=self.apply_chat_template,
                fewshot_as_multiturn=self.fewshot_as_multiturn,
                system_instruction=self.system,
                log_samples=self.samples,
            )
        finally:
            texts.close()
        self._show(results, texts)
        print(f"{time.perf_counter() - started:.1f} s", file=sys.stderr)

    def _check(self) -> None:
        """Check the options alone; raises UserError."""
        self.check_template(self.format)
        if find_spec("lm_eval") is None:
            raise UserError('tasks need the lm-evaluation-harness; install it with pip install -e ".[lm-eval]"')
        if self.limit is not None and not (0 < self.limit < 1 or (self.limit >= 1 and self.limit == int(self.limit))):
            raise UserError(f"limit={self.limit} must be a number of questions, or a share of them between 0 and 1")
        if self.include_path is not None and not self.include_path.is_dir():
            raise UserError(f"--include-path {self.include_path} is not a folder; pass one with .yaml files of tasks")
        for name, is_set in (
            ("--format", self.format != "auto"),
            ("--chat-template", self.chat_template is not None),
            ("--template-arg", self.template_arg),
            ("--no-fewshot-as-multiturn", not self.fewshot_as_multiturn),
        ):
            if is_set and not self.apply_chat_template:
                raise UserError(f"{name} needs --apply-chat-template")
        if self.output is None and (self.samples or self.overwrite):
            raise UserError(f"--{'samples' if self.samples else 'overwrite'} needs a file; set it with --output")
        elif self.output is not None and self.output.is_dir():
            raise UserError(f"--output {self.output} is a folder, not a file")
        elif self.output is not None and self.output.exists() and not self.overwrite:
            raise UserError(f"{self.output} exists; remove it, or replace it with --overwrite")

    def _find_tasks(self) -> tuple[list[str], Any]:
        """The names of the tasks that --tasks matches, and their manager; UserError for a name without a match."""
        from lm_eval.tasks import TaskManager

        manager = TaskManager(include_path=None if self.include_path is None else str(self.include_path))
        task_names: list[str] = []
        for name in filter(None, (part.strip() for part in self.tasks.split(","))):
            names = manager.match_tasks([name])
            if not names:
                where = "" if self.include_path is None else f" or of {self.include_path}"
                raise UserError(f"--tasks: {short_repr(name)} is not a task of the lm-evaluation-harness{where}")
            task_names += names
        if not task_names:
            raise UserError("--tasks names no task; list some, for example arc_easy,hellaswag")
        return list(dict.fromkeys(task_names)), manager

    def _texts(self) -> TextModel:
        from llama_jax.evaluation.text_model import TextModel

        config, params, tokenizer = self.load_with_tokenizer(self.adapter)
        tokenizer = self.with_template(tokenizer)
        if self.apply_chat_template:
            resolve_format(tokenizer, self.format)
        return TextModel(
            config,
            params,
            tokenizer,
            bos=self.bos,
            format=self.format,
            template_args=self.template_args(),
            batch=self.batch,
            seed=self.seed,
            options=llama_jax.EngineOptions(rows=self.batch or llama_jax.EngineOptions.rows, compute=self.compute()),
        )

    def _show(self, results: dict[str, Any], texts: TextModel) -> None:
        """The harness' own tables on stdout, and all in the file."""
        from lm_eval.utils import handle_non_serializable, make_table

        settings = {
            "version": llama_jax.__version__,
            "model": str(self.model),
            "adapter": None if self.adapter is None else str(self.adapter),
            "dtype": self.dtype,
            "quantize": self.quantize,
            "bos": self.bos,
            "cut": texts.cut,
        }
        if self.output is not None:
            report = json.dumps(
                {"llama_jax": settings, **results}, indent=2, ensure_ascii=False, default=handle_non_serializable
            )
            with write_atomically(self.output) as target:
                target.write_text(report + "\n", encoding="utf-8")
        print(printable(str(self.model)))
        print(make_table(results))
        if results.get("groups"):
            print(make_table(results, "groups"))
        if texts.cut:
            print_status(f"{texts.cut} texts were longer than the context and lost their beginning")
