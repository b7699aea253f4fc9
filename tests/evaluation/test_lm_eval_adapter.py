"""The lm-evaluation-harness' own tasks by this model and by its backend for transformers, side by side."""

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import make_goldens
import pytest
import tokenizers
import vocabularies
from adapters import LORA, random_adapters
from commands import run_here
from conftest import write_hf_folder

import llama_jax
from llama_jax import EngineOptions
from llama_jax.formats import save_adapter

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

SMALL = EngineOptions(rows=4, prefill_chunk=16)
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
ENDS = {"bytes": ("<|begin_of_text|>", "<|end_of_text|>"), "spaces": ("<s>", "</s>")}
TASKS = {
    "choose": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_target": "answer",
        "doc_to_choice": "choices",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "predict": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "continue": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["th"], "max_gen_toks": 16, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
    "empty": {  # nothing precedes what is predicted
        "output_type": "loglikelihood",
        "doc_to_text": "",
        "doc_to_target": "{{choices[0]}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
}
DOCUMENTS = [
    {
        "question": question,
        "choices": choices,
        "answer": number % len(choices),
        "text": f"{question}{choices[0]} " + "the tree in the thin hat " * (1 + 9 * (number % 3)),
    }
    for number, (question, choices) in enumerate(
        [
            ("the thin tree is", [" in the hat", " not there", " a", " b"]),
            ("one letter:", [" a", " b", " c", " d"]),
            ("it ends with a space ", ["here", "there"]),
            ("the\n\nthe", ["\n", "\n\n", " the"]),
            ("x" * 200, ["y", " the end of a long text"]),  # longer than the context
            ("Hello", [" world", "!"]),
        ]
    )
]


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    for name in ("lm_eval", "torch", "transformers"):
        pytest.importorskip(name, reason="needs the extras parity and lm-eval")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)


@pytest.fixture
def tasks(tmp_path):
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "documents.json").write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    for name, settings in TASKS.items():
        data = {"data_files": {"test": str(folder / "documents.json")}}
        whole = {"task": f"mine_{name}", "dataset_path": "json", "dataset_kwargs": data, "test_split": "test", **settings}
        (folder / f"{name}.yaml").write_text(json.dumps(whole))  # which is YAML too
    return folder


def model_folder(folder: Path, kind: str) -> Path:
    """A random model with a vocabulary in the manner of Llama 3 or Llama 2, whose texts begin with BOS."""
    bos, eos = ENDS[kind]
    library = tokenizers.Tokenizer.from_str(vocabularies.FILES[kind][1]().decode())
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, library.token_to_id(bos))]
    )
    config = replace(make_goldens.KINDS["gqa"], vocab_size=library.get_vocab_size(), max_seq_len=128)
    ends = {"bos_token_id": library.token_to_id(bos), "eos_token_id": library.token_to_id(eos)}
    tensors = {name: 3 * array if array.ndim > 1 else array for name, array in make_goldens.random_tensors(config).items()}
    if kind == "spaces":  # no bytes alone: of those that are no UTF-8 transformers loses all beside them
        tensors["lm_head.weight"][:259] = 0
    write_hf_folder(folder, config, tensors, **ends)
    library.save(str(folder / "tokenizer.json"))
    if kind == "spaces":
        vocabularies.find_special_tokens_in_raw_text(folder / "tokenizer.json")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos, "pad_token": eos}
    settings["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps(ends))
    return folder


def run(model, tasks, **options):
    """Results by task, and what was asked and answered: [(arguments, answers)] by task."""
    lm_eval = importlib.import_module("lm_eval")
    manager = importlib.import_module("lm_eval.tasks").TaskManager(include_path=str(tasks), include_defaults=False)
    names = [f"mine_{name}" for name in TASKS]
    found = lm_eval.simple_evaluate(model=model, tasks=names, task_manager=manager, bootstrap_iters=0, **options)
    samples = {
        name: [
            (sample["arguments"], sample["resps"]) for sample in sorted(found["samples"][name], key=lambda s: s["doc_id"])
        ]
        for name in names
    }
    return found["results"], samples


def ours(folder):
    harness, texts = (importlib.import_module(f"llama_jax.evaluation.{name}") for name in ("lm_eval_adapter", "text_model"))
    return harness.HarnessModel(texts.TextModel(*llama_jax.load(folder), options=SMALL), "mine")


def theirs(folder):
    backend = importlib.import_module("lm_eval.models.huggingface").HFLM
    return backend(pretrained=str(folder), dtype="float32", device="cpu", batch_size=2)


def numbers(answers):
    """The floats in answers of any nesting."""
    for answer in answers:
        if isinstance(answer, str):
            answer = json.loads(answer.replace("(", "[").replace(")", "]").lower())
        if isinstance(answer, list | tuple):
            yield from numbers(answer)
        else:
            yield float(answer)


@pytest.mark.parametrize("kind", ["bytes", "spaces"])
def test_it_answers_as_the_backend_for_transformers(kind, tasks, tmp_path):
    """Log-probabilities to 1e-3, and what is greedy and what is generated alike."""
    folder = model_folder(tmp_path / "model", kind)
    (found, asked), (wanted, asked_there) = (run(make(folder), tasks) for make in (ours, theirs))
    for name, samples in asked_there.items():
        for (arguments, answers), (their_arguments, their_answers) in zip(asked[name], samples, strict=True):
            assert arguments == their_arguments
            if name == "mine_continue":
                assert answers == their_answers
            else:
                assert list(numbers(answers)) == pytest.approx(list(numbers(their_answers)), abs=1e-3)
        for metric, value in wanted[name].items():
            if isinstance(value, float):
                assert found[name][metric] == pytest.approx(value, rel=1e-3), metric
    assert len({answers[0][0] for _, answers in asked["mine_continue"]}) > 1


def test_chats_and_examples_before_the_question(tasks, tmp_path):
    folder = model_folder(tmp_path / "model", "bytes")
    options = {"apply_chat_template": True, "fewshot_as_multiturn": True, "num_fewshot": 1, "limit": 2}
    options["system_instruction"] = "the tree"
    (_, asked), (_, wanted) = (run(make(folder), tasks, **options) for make in (ours, theirs))
    (arguments, answers), (their_arguments, their_answers) = asked["mine_continue"][0], wanted["mine_continue"][0]
    assert arguments == their_arguments
    assert str(arguments).count("assistant: ") == 2
    assert answers == their_answers
    for (_, answers), (_, their_answers) in zip(asked["mine_choose"], wanted["mine_choose"], strict=True):
        assert list(numbers(answers)) == pytest.approx(list(numbers(their_answers)), abs=1e-3)


def test_the_command(tasks, tmp_path):
    folder = model_folder(tmp_path / "model", "bytes")
    done = run_here(
        *("lm-eval", folder, "--tasks", "mine_*", "--include-path", tasks, "--limit", 2, "--batch", 2),
        *("--output", tmp_path / "out.json", "--samples"),
    )
    assert done.returncode == 0, done.stderr
    for name in TASKS:
        assert f"|mine_{name}" in done.stdout
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["llama_jax"]["model"] == str(folder)
    assert len(found["samples"]["mine_choose"]) == 2
    alone = ours(folder)
    sample = found["samples"]["mine_choose"][0]
    context, continuation = sample["arguments"][0]
    score = alone.texts.score([alone.texts.pair(context, continuation)])[0]
    assert next(numbers([sample["filtered_resps"][0]])) == pytest.approx(score.logprob, abs=1e-4)

    again = run_here("lm-eval", folder, "--tasks", "mine_choose", "--include-path", tasks, "--output", tmp_path / "out.json")
    assert (again.returncode, "exists; remove it" in again.stderr) == (2, True)
    none = run_here("lm-eval", folder, "--tasks", "mine_none", "--include-path", tasks)
    assert (none.returncode, "'mine_none' is not a task" in none.stderr) == (2, True)


def test_the_command_with_an_adapter_in_fewer_bits(tasks, tmp_path):
    folder, out = model_folder(tmp_path / "model", "bytes"), tmp_path / "out.json"
    config = llama_jax.load(folder).config
    save_adapter(tmp_path / "adapter", config, random_adapters(config), LORA)
    told = "--adapter", tmp_path / "adapter", "--quantize", "int8"
    done = run_here(
        *("lm-eval", folder, "--tasks", "mine_choose", "--include-path", tasks, *told, "--limit", 1),
        *("--output", out, "--samples"),
    )
    assert done.returncode == 0, done.stderr
    (sample,) = json.loads(out.read_text())["samples"]["mine_choose"]
    texts = importlib.import_module("llama_jax.evaluation.text_model")
    model = texts.TextModel(*llama_jax.load(folder, adapter=tmp_path / "adapter", quantize="int8"), options=SMALL)
    (score,) = model.score([model.pair(*sample["arguments"][0])])
    assert next(numbers([sample["filtered_resps"][0]])) == pytest.approx(score.logprob, abs=1e-4)
    (plain,) = ours(folder).texts.score([model.pair(*sample["arguments"][0])])
    assert plain.logprob != pytest.approx(score.logprob, abs=1e-2)


def test_neither_torch_nor_transformers_takes_part():
    """A process that has neither can import all of it."""
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'accelerate', 'peft'): sys.modules[name] = None\n"
        "import lm_eval, llama_jax.evaluation.lm_eval_adapter\n"
        "from lm_eval.tasks import TaskManager\n"
        "lm_eval.simple_evaluate"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
