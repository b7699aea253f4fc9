"""``llama-jax verify``: does a model compute what its reference computes, and if not, how far and where does it differ?"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import tyro

import llama_jax
from llama_jax.cli.options import QUANTIZE, CompileOptions, ModelPath, PartsOption, unless_auto
from llama_jax.cli.terminal import as_json, columns, printable
from llama_jax.config import LlamaConfig, RopeScaling
from llama_jax.errors import UserError
from llama_jax.settings import at_least
from llama_jax.tokenizers import Tokenizer

if TYPE_CHECKING:
    import numpy as np

    from llama_jax.formats.weight_format import OpenedCheckpoint
    from llama_jax.verify.activations import Trace
    from llama_jax.verify.compare import ComparedPart, Comparison, Differences
    from llama_jax.verify.rounding_error import MatrixError, Origin

DEFAULT_TOKENS = 64
MAX_TEXT_LENGTH = 1 << 20  # characters


@dataclass(frozen=True)
class Verify(PartsOption, CompileOptions):
    """Compare a model with a reference: its logits and every layer. Exit code 0 if they are the same, 1 if not.

    Without a reference, --quantize compares the quantized model with the stored one; otherwise the model is checked as far
    as possible without a reference."""

    path: tyro.conf.Positional[ModelPath]
    """Folder or file of a model, in any supported format."""
    against: Path | None = None
    """The reference: a Hugging Face folder, which transformers runs in float32 (needs the extra 'parity')."""
    oracle: Path | None = None
    """The reference: a file written by --write-oracle, on any machine and from any format."""
    write_oracle: Path | None = None
    """Write the outputs of --against to this file, or without --against those of PATH."""
    text: Path | None = None
    """Text in UTF-8 to use as input. The default is a built-in text."""
    tokens: Annotated[int, at_least(2)] | None = None
    """Maximum number of input tokens. The default is 64. Without a vocabulary they are random."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of weights and arithmetic of PATH; the reference keeps its own."""
    quantize: QUANTIZE = "auto"
    """Quantize the matrices of PATH, as in generate; keep leaves those of a quantized file as they are. The reference is not
    quantized; without one, it is PATH itself."""
    adapter: ModelPath | None = None
    """A LoRA adapter for PATH: a PEFT folder, or the folder of a run that trained one. It is not added to a reference, which
    should be the merged model. With --quantize and no reference, PATH is compared with itself, both with the adapter."""
    per_layer: bool = False
    """Show the difference of every layer and, with --quantize, of every matrix."""
    json: bool = False
    """Print a JSON object instead, with every layer and matrix."""

    def run(self) -> None:
        self._check_options()
        from llama_jax.cli.jax_setup import loading_bar
        from llama_jax.formats.adapters import with_adapter_parts
        from llama_jax.formats.build_params import plan
        from llama_jax.formats.loading import load, open_checkpoint
        from llama_jax.formats.quantize_on_load import check_kept
        from llama_jax.model.trees import param_shapes
        from llama_jax.model.trees import quantize as quantize_params
        from llama_jax.verify.activations import check_oracle_path, read_oracle, run_transformers, trace, write_oracle
        from llama_jax.verify.compare import compare
        from llama_jax.verify.rounding_error import matrix_errors, rounding_of

        # Quick checks come first: no mistake should be found after minutes of loading.
        self.start_jax()
        opened = open_checkpoint(self.path)
        if self.quantize == "keep":
            check_kept(list(opened.tensors.values()), opened.path)
        elif self.quantize != "auto":
            quantize_params(param_shapes(opened.config), self.quantize)  # raises for a kind that its matrices cannot have
        (config,) = self.with_parts(with_adapter_parts(opened.config, [] if self.adapter is None else [self.adapter]))
        origin, tokenizer = self._origin(opened, config), opened.tokenizer()
        reference: Trace | None = None
        if self.oracle is not None:
            reference = read_oracle(self.oracle)
            self._check_sizes(config, reference.origin.config)
            tokens, read = reference.tokens, f"{len(reference.tokens)} tokens of the oracle"
        else:
            if self.against is not None:
                theirs = self._open_against(config)
                tokenizer = theirs if tokenizer is None else tokenizer
            tokens, read = self._tokens(config, tokenizer)
        if self.write_oracle is not None:
            check_oracle_path(self.write_oracle, config, len(tokens))

        # One model after the other, so that memory holds only one.
        quantize = unless_auto(self.quantize)
        if self.against is not None:
            reference = run_transformers(self.against, tokens)
        elif reference is None and quantize is not None:
            dense = load(self.path, self.dtype, adapter=self.adapter, progress=loading_bar).params
            reference = trace(dense, tokens, origin)
            del dense
        params = load(self.path, self.dtype, quantize=quantize, adapter=self.adapter, progress=loading_bar).params
        rounding = None if quantize is None else (quantize, rounding_of(quantize, max(config.dim, config.hidden_dim)))
        ours = trace(params, tokens, replace(origin, quantized=rounding))
        if self.write_oracle is not None:
            write_oracle(self.write_oracle, ours if reference is None else reference)
            print(f"{self.write_oracle}: {self.write_oracle.stat().st_size / 1e6:.1f} MB written", file=sys.stderr)
        if reference is None:
            self._end_alone(ours, tokenizer, read, len(opened.tensors))
        else:
            errors: tuple[MatrixError, ...] = ()
            if quantize is not None:  # the originals are read again, by orbax as a whole model
                dense = plan(opened) if opened.names else load(self.path, self.dtype).params
                errors = matrix_errors(params, dense)
            self._end_compared(compare(params, ours, reference), ours.origin, reference.origin, read, errors)

    def _check_options(self) -> None:
        if self.against is not None and self.oracle is not None:
            raise UserError("--against and --oracle both name a reference; omit one of them")
        if self.oracle is not None:
            for name, value in (("text", self.text), ("tokens", self.tokens), ("write-oracle", self.write_oracle)):
                if value is not None:
                    raise UserError(f"--{name} cannot be combined with --oracle, which has its own input; omit it")
        if self.oracle is None and self.against is None and self.per_layer and self.quantize == "auto":
            raise UserError("--per-layer compares with a reference; name one with --against or --oracle")
        if self.write_oracle is not None and self.quantize != "auto":
            raise UserError("--write-oracle stores the outputs of unquantized weights; omit --quantize")

    def _origin(self, opened: OpenedCheckpoint, config: LlamaConfig) -> Origin:
        """The origin of this model's numbers; names and shapes are checked."""
        import jax

        from llama_jax.formats.loading import check_names
        from llama_jax.verify.rounding_error import origin_of

        check_names(opened)
        versions = {"llama_jax": llama_jax.__version__, "jax": jax.__version__}
        beside = "" if self.adapter is None else f" with {self.adapter}"
        name = f"{self.path} ({opened.format}){beside}"
        return origin_of(name, config, list(opened.tensors.values()), self.dtype, versions)

    def _open_against(self, config: LlamaConfig) -> Tokenizer | None:
        """Look at the folder that transformers is to run, for its sizes and its vocabulary."""
        from llama_jax.formats.huggingface import open_huggingface
        from llama_jax.verify.activations import check_transformers

        assert self.against is not None
        if not (self.against / "config.json").is_file():
            raise UserError(
                f"--against {self.against} is not a Hugging Face folder, which transformers needs: no config.json"
            )
        check_transformers()
        opened = open_huggingface(self.against)
        if opened.config.parts:
            raise UserError(f"--against {self.against} has {opened.config.parts}, which transformers does not compute with")
        self._check_sizes(config, opened.config)
        return opened.tokenizer()

    def _check_sizes(self, config: LlamaConfig, reference_config: LlamaConfig) -> None:
        """Exit if the two models cannot be compared."""
        from llama_jax.verify.compare import comparable, differing_settings, in_words

        settings = differing_settings(config, reference_config)
        if not comparable(settings):
            self._end(False, f"NOT the same model: {in_words(settings)}", "", {"settings": _setting_pairs(settings)})

    def _tokens(self, config: LlamaConfig, tokenizer: Tokenizer | None) -> tuple[np.ndarray, str]:
        """What to read, int32[T], and in words what it is."""
        import numpy as np

        from llama_jax.tokenizers.interface import check_token_rows

        count = min(DEFAULT_TOKENS, config.max_seq_len) if self.tokens is None else self.tokens
        if count > config.max_seq_len:
            raise UserError(f"tokens={count} exceed the model's context of {config.max_seq_len}")
        if tokenizer is None:
            if self.text is not None:
                raise UserError(f"--text needs a vocabulary, but {self.path} has none; omit it for random tokens")
            ids = np.random.default_rng(0).integers(0, config.vocab_size, count, dtype=np.int32)
            return ids, f"{count} random tokens, because there is no vocabulary"
        ids = np.array(tokenizer.encode(self._text())[:count], np.int32)
        if len(ids) < 2:
            raise UserError(f"{self.text} has {len(ids)} tokens; use a text of at least 2")
        check_token_rows(tokenizer, ids, config.vocab_size, "the text")
        return ids, f"{len(ids)} tokens of {'the built-in text' if self.text is None else self.text}"

    def _text(self) -> str:
        from llama_jax.verify import activations

        if self.text is None:
            return activations.SAMPLE_TEXT
        if not self.text.is_file():  # a pipe would be waited for
            raise UserError(f"{self.text} is not a file")
        try:
            with self.text.open(encoding="utf-8", newline="") as file:
                return file.read(MAX_TEXT_LENGTH)
        except UnicodeDecodeError as error:
            raise UserError(f"{self.text} is not text in UTF-8 ({error.reason} at byte {error.start})") from None

    def _end_alone(self, ours: Trace, tokenizer: Tokenizer | None, read: str, tensors: int) -> NoReturn:
        from llama_jax.verify.activations import MIN_TOKENS, Check, check_logits, check_speech, check_vocabulary

        checks = [Check("tensors", True, f"{tensors:,}, with the names and shapes of the configuration, all finite")]
        if tokenizer is not None:
            checks.append(check_vocabulary(tokenizer, ours.origin.config.vocab_size, self._text()))
        checks.append(check_logits(ours))
        readable = tokenizer is not None and len(ours.tokens) >= MIN_TOKENS
        if readable and checks[-1].passed:
            checks.append(check_speech(ours))
        failed = [check.name for check in checks if not check.passed]
        if failed:
            why = f"NOT a sound model: {', '.join(failed)}"
        elif readable:
            why = "complete, and it predicts text; to be sure that it is right, compare it with --against or --oracle"
        else:
            why = f"complete; to check its predictions, use {MIN_TOKENS} tokens of text; to be sure, use a reference"
        rows = [[check.name, printable(check.detail)] for check in checks]
        page = f"{_describe_origin(ours.origin)}\nread {printable(read)}\n\n{columns(rows)}\n"
        facts = {"here": _origin_facts(ours.origin), "read": read, "checks": [check._asdict() for check in checks]}
        self._end(not failed, why, page, facts)

    def _end_compared(
        self, comparison: Comparison, origin: Origin, reference_origin: Origin, read: str, errors: tuple[MatrixError, ...]
    ) -> NoReturn:
        agreeing = f"{comparison.agreeing} of {comparison.positions}"
        if comparison.ties:
            agreeing += f", {comparison.ties} more are ties"
        ratio = _exp(comparison.loss - comparison.reference_loss)
        rows = [
            ["logits", f"largest difference {comparison.max_abs:.2g}, the reference's largest {comparison.largest:.3g}"],
            [
                "KL divergence",
                f"mean {comparison.kl:.2g} nats, largest {comparison.kl_max:.2g} at position {comparison.kl_max_at}",
            ],
            [
                "perplexity",
                f"{_exp(comparison.loss):.5g}, the reference's {_exp(comparison.reference_loss):.5g}: ratio {ratio:.5f}",
            ],
            ["top-1 agreement", agreeing],
        ]
        against = _describe_origin(reference_origin)
        page = f"{_describe_origin(origin)}\nagainst {against}\nread {printable(read)}\n\n{columns(rows)}\n"
        if self.per_layer:
            page += f"\n{_parts_table(comparison.parts)}\n"
            page += f"\n{_matrices_table(errors)}\n" if errors else ""
        facts = {
            "here": _origin_facts(origin),
            "there": _origin_facts(reference_origin),
            "read": read,
            "settings": _setting_pairs(comparison.settings),
            "rounding": comparison.rounding,
            "logits": {"max_abs": comparison.max_abs, "largest": comparison.largest},
            "kl": {"mean": comparison.kl, "max": comparison.kl_max, "position": comparison.kl_max_at},
            "loss": {"here": comparison.loss, "there": comparison.reference_loss},
            "perplexity_ratio": ratio,
            "top1": {"agreeing": comparison.agreeing, "ties": comparison.ties, "of": comparison.positions},
            "parts": [part._asdict() for part in comparison.parts],
            "matrices": [error._asdict() for error in errors],
        }
        self._end(comparison.same, comparison.why, page, facts)

    def _end(self, same: bool, why: str, page: str, facts: dict[str, Any]) -> NoReturn:
        """Print the page and the verdict, or all as JSON, and exit with the verdict's code."""
        if self.json:
            print(as_json({"same": same, "verdict": why} | facts))
        else:
            print(f"{page}\n{why}" if page else why)
        sys.stdout.flush()
        sys.exit(0 if same else 1)


def _exp(nats: float) -> float:
    """A perplexity, which may be too large for a float."""
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.exp(nats))


def _describe_origin(origin: Origin) -> str:
    quantized = f", quantized as {origin.quantized[0]}" if origin.quantized else ""
    return f"{printable(origin.name)}: {', '.join(origin.tensor_types)}{quantized}, computed in {origin.dtype}"


def _origin_facts(origin: Origin) -> dict[str, Any]:
    quantized = None if origin.quantized is None else origin.quantized[0]
    return {
        "name": origin.name,
        "kinds": origin.tensor_types,
        "quantized": quantized,
        "dtype": origin.dtype,
        "versions": origin.versions,
    }


def _setting_pairs(settings: Differences) -> dict[str, list[Any]]:
    return {name: [asdict(value) if isinstance(value, RopeScaling) else value for value in pair] for name, *pair in settings}


def _parts_table(parts: tuple[ComparedPart, ...]) -> str:
    rows = [["", "max abs", "relative", "alone", "roundings"]]
    rows += [[p.name, f"{p.max_abs:.2g}", f"{p.relative:.2g}", f"{p.alone:.2g}", f"{p.roundings:,.1f}"] for p in parts]
    legend = """
  max abs, relative: of the residual stream after the part
  alone: of the part by itself, given the reference's stream, relative to what it adds
  roundings: how many times what rounding explains of its own difference"""
    return columns(rows, right=(1, 2, 3, 4), indent="  ") + legend


def _matrices_table(errors: tuple[MatrixError, ...]) -> str:
    """A row for each layer, a column for each matrix in it; those outside of the layers before."""
    heads = ["", "kind", "bits", "error"]
    outside = [
        [error.name, error.quant_format, f"{error.bits:.2f}", f"{error.relative:.2%}"]
        for error in errors
        if error.layer is None
    ]
    inside = [error for error in errors if error.layer is not None]
    names = list(dict.fromkeys(error.name for error in inside))
    formats = [", ".join(dict.fromkeys(error.quant_format for error in inside if error.name == name)) for name in names]
    rows = [["", *(name.split(".")[-1] for name in names)], ["", *formats]]
    for layer in dict.fromkeys(error.layer for error in inside):
        of_layer = {error.name: f"{error.relative:.2%}" for error in inside if error.layer == layer}
        rows.append([f"layer {layer}", *(of_layer.get(name, "") for name in names)])
    tables = [columns([heads, *outside], right=(2, 3), indent="  ")] if outside else []
    tables += [columns(rows, right=range(1, len(names) + 1), indent="  ")] if inside else []
    return "\n\n".join(tables) + "\n  error: root mean square of what the matrix is wrong by, relative to its numbers"
