"""What commands refuse: one line that says why and what to do, exit code 2, and nothing on stdout."""

import json
import shlex

import make_goldens
import pytest
from commands import error_of, run_here
from conftest import write_hf_folder
from make_format_goldens import FORMATS

AN_OBJECT = 'line 2 must be an object like {"prompt": "Once upon a time"}'
REFUSED = [
    # the commands' names and usage
    ("sevre", "there is no command 'sevre'; did you mean serve"),
    # generate
    ("generate ''", "the prompt is empty"),
    ("generate caf\udcff", "the prompt is not valid UTF-8"),
    ("generate Once --model nowhere", "nowhere does not exist"),
    ("generate Once --model STORIES --max-new-tokens 0", "max_new_tokens=0"),
    ("generate Once --model STORIES --max-new-tokens 600", "exceed the model's context of 512"),
    (f"generate '{'Once ' * 600}' --model STORIES", "only a window, for example with --window 256 --sinks 4"),
    ("generate Once --model STORIES --rope yawn:2", "must be none, or KIND:FACTOR such as yarn:4"),
    ("generate Once --prompt-file -", "pass a prompt or --prompt-file FILE, not both"),
    ("generate", "pass a prompt or --prompt-file FILE, or - for stdin"),
    ("generate --prompt-file nowhere.txt", "nowhere.txt cannot be read"),
    ("generate --prompt-file STORIES", "cannot be read: Is a directory"),
    ("generate --prompt-file -", "the prompt in stdin is empty"),
    ("generate --prompt-file /dev/zero", "/dev/zero has more than 256 MiB of prompts; split it into several files"),
    ("generate Once --batch 4", "batch=4 is only for the prompts of a .jsonl (--prompt-file); omit it"),
    ("generate Once --draft prompt:0", "tokens=0 must be at least 1 and at most 15"),
    (f"generate Once --draft prompt:{'9' * 5000}", "cannot be read: File name too long"),
    ("generate Once --draft STORIES", "has a vocabulary of 512, but the model's has 4096; use a draft with the model's"),
    ("generate Once --model STORIES --stop ''", "--stop '' must be a text"),
    ("generate Once --model STORIES --tokenizer STORIES/expected.txt", "is not a SentencePiece model"),
    ("generate Once --model STORIES/expected.txt", "not a model of a supported format"),
    ("generate Once --model MODEL", "pass one with --tokenizer"),
    ("generate Once --mesh tensor=9", "needs 9 devices, but there are 8"),
    ("generate Once --mesh data=2", "only the Python API splits prompts over data and fsdp; use only tensor"),
    ("generate Once --mesh context=2", "generation has no sequence to split over context; use only tensor"),
    ("generate Once --mesh tensor=4", "n_kv_heads=1 (of 2 queries each) cannot be split over tensor=4; 1, 2 would do"),
    ("generate --prompt-file PROMPTS-text", "line 2 is not JSON (Expecting value at column 1)"),
    ("generate --prompt-file PROMPTS-list", "line 2 is a list; JSONL has one object per line"),
    ("generate --prompt-file PROMPTS-fields", AN_OBJECT),
    ("generate --prompt-file PROMPTS-empty", AN_OBJECT),
    ("generate --prompt-file PROMPTS-adapter", "requests the adapter 'poems', but generate has one for all prompts"),
    # chat
    ("chat --model STORIES", "choose a format (--format): chatml, gemma, llama2"),
    ("chat --model STORIES --format llama3", "the format llama3 needs the token <|begin_of_text|>"),
    ("chat --model STORIES --format plain --context 1000", "context=1000 exceeds the model's context of 512; lower it"),
    ("chat --model STORIES --format plain --context 0", "context=0 must be at least 1"),
    ("chat --model STORIES --format plain --max-new-tokens 512", "leaves no room for a message in a context of 512"),
    ("chat --model STORIES --template-arg mood", "must be NAME=VALUE"),
    ("chat --model STORIES --chat-template missing.jinja", "does not exist; pass a file"),
    # compile, convert, data
    ("compile --no-cache", "compile needs the cache of programs; omit --no-cache"),
    ("compile --max-tokens 0", "max_tokens=0"),
    ("convert nowhere out --format gguf", "nowhere does not exist"),
    ("convert FORMATS/meta-1 FORMATS/meta-2", "meta-2 exists; remove it, or replace it with --overwrite (overwrite=True)"),
    ("convert FORMATS/meta-1 out.safetensors", "is named like a file, but safetensors is a folder"),
    ("convert FORMATS/meta-1 out --dtype q8_0", "dtype='q8_0': the safetensors format"),
    ("convert FORMATS/meta-1 /proc/out --format gguf", "No such file or directory"),
    ("convert FORMATS/meta-1 " + "a" * 300, "cannot be read: File name too long"),
    ("convert FORMATS/meta-1 .", "is the current folder, which cannot be replaced; use a folder inside it"),
    ("data show CHATS --format plain --examples 0", "examples=0"),
    ("data show CHATS --format plain --length 0", "length=0"),
    ("data show CHATS --format plain --too-long drop", "--too-long drop needs --length"),
    ("data show CHATS --format plain --line 9", "has no example from line 9 on"),
    ("data show TEXT", "is not a file that ends in .jsonl, .json, .parquet, .arrow"),
    ("data show PAIRS --data-type chats", "line 1: the fields are ['prompt', 'chosen', 'rejected']"),
    # estimate
    ("estimate llama-9 --batch 4 --length 32", "'llama-9' is neither a preset nor a path; the presets are llama-7b, "),
    ("estimate stories-260k --batch 4 --length 32 --mesh banana", "'banana' is not axis=size; write it as data=2,fsdp=4"),
    ("estimate stories-260k --batch 4 --length 32 --mesh tensor=8", "hidden_dim=172 cannot be split over tensor=8"),
    ("estimate stories-260k --batch 4 --length 32 --mesh data=99999", "exceeds the 2048 that can be simulated"),
    ("estimate stories-260k --batch 0 --length 32", "batch=0 must be at least 1"),
    ("estimate stories-260k --batch 4 --length 1000000000 --mode train", "are more than XLA can plan for"),
    ("estimate stories-260k --batch 4 --length 513", "length=513 exceeds the model's context of 512"),
    ("estimate stories-260k --batch 4 --length 32 --remat full", "--remat full is only for --mode train"),
    ("estimate stories-260k --batch 4 --length 32 --lora 4", "--lora 4 is only for --mode train"),
    ("estimate stories-260k --batch 4 --length 32 --mode train --cache int8", "--cache int8 is only for --mode decode"),
    ("estimate stories-260k --batch 4 --length 32 --mode train --quantize int8", "training changes its weights"),
    ("estimate stories-260k --batch 4 --length 32 --hardware H200", "hardware 'H200' is not in the table; did you mean"),
    ("estimate stories-260k --batch 4 --length 32 --mesh context=2 --attention dense", "which uses ring attention; omit it"),
    # eval, lm-eval
    ("eval nowhere --data TEXT", "nowhere does not exist"),
    ("eval STORIES --data nowhere", "nowhere does not exist"),
    ("eval STORIES --data TEXT --max-documents 0", "max_documents=0 must be at least 1"),
    ("eval STORIES --data TEXT --separator=", "separator=''"),
    ("eval STORIES --data TEXT --format plain", "format='plain' does not apply to text, the kind of these data"),
    ("eval STORIES --data CHATS --stride 32", "stride=32 does not apply to chats, the kind of these data; omit it"),
    ("eval STORIES --data PAIRS --length 9999", "length=9999 must be at least 1 and within the context of 512"),
    ("eval MODEL --data TEXT", "pass one with --tokenizer"),
    ("lm-eval model --tasks arc_easy --limit 1.5", "limit=1.5 must be a number of questions, or a share of them"),
    ("lm-eval model --tasks arc_easy --num-fewshot -1", "num_fewshot=-1 must be at least 0"),
    ("lm-eval model --tasks arc_easy --include-path nowhere", "--include-path nowhere is not a folder"),
    ("lm-eval model --tasks arc_easy --format llama3", "--format needs --apply-chat-template"),
    ("lm-eval model --tasks arc_easy --samples", "--samples needs a file; set it with --output"),
    ("lm-eval model --tasks arc_easy --output .", "--output . is a folder, not a file"),
    # inspect, verify
    ("inspect nowhere", "does not exist"),
    ("inspect TEXT", "not a model of a supported format"),
    ("verify nowhere", "nowhere does not exist"),
    ("verify MODEL --oracle nowhere", "nowhere is not a file"),
    ("verify MODEL --oracle MODEL/config.json", "is not a whole oracle"),
    ("verify MODEL --oracle x --against y", "--against and --oracle both name a reference"),
    ("verify MODEL --oracle x --tokens 8", "--tokens cannot be combined with --oracle"),
    ("verify MODEL --per-layer", "--per-layer compares with a reference"),
    ("verify MODEL --quantize int8 --write-oracle y", "--write-oracle stores the outputs of unquantized weights"),
    ("verify MODEL --quantize int4", "int4 needs multiples of 32"),
    ("verify MODEL --quantize keep", "has no tensor in a supported format"),
    ("verify MODEL --tokens 65", "tokens=65 exceed the model's context of 64"),
    ("verify MODEL --text TEXT", "--text needs a vocabulary"),
    ("verify MODEL --write-oracle MODEL/none/oracle", "cannot be written"),
    ("verify STORIES --text LATIN", "is not text in UTF-8 (invalid start byte at byte 3)"),
    ("verify STORIES --text EMPTY", "use a text of at least 2"),
]
PROMPTS = {
    "text": "Once",
    "list": '["Once"]',
    "fields": '{"text": "Once"}',
    "empty": '{"prompt": ""}',
    "adapter": '{"prompt": "Once", "adapter": "poems"}',
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory, stories_folder):
    """Paths by the names that stand for them in the table."""
    folder = tmp_path_factory.mktemp("paths")
    paths = {"STORIES": stories_folder, "FORMATS": FORMATS}
    paths["MODEL"] = write_hf_folder(folder / "model", make_goldens.KINDS["gqa"])
    chat, pair = {"prompt": "Once", "completion": " upon"}, {"prompt": "Hi", "chosen": "Hello", "rejected": "No"}
    texts = {"CHATS": ("chats.jsonl", json.dumps(chat)), "PAIRS": ("pairs.jsonl", json.dumps(pair))}
    texts |= {"TEXT": ("text.txt", "The dog was happy."), "EMPTY": ("empty.txt", "")}
    texts |= {f"PROMPTS-{name}": (f"{name}.jsonl", f'{{"prompt": "Once"}}\n{line}') for name, line in PROMPTS.items()}
    for name, (file, text) in texts.items():
        paths[name] = folder / file
        paths[name].write_text(text)
    paths["LATIN"] = folder / "latin.txt"
    paths["LATIN"].write_bytes(b"caf\xff")
    return paths


@pytest.mark.parametrize(("line", "message"), REFUSED, ids=[line[:60] for line, _ in REFUSED])
def test_what_is_refused(paths, tmp_path, monkeypatch, line, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("llama_jax.cli.lm_eval.find_spec", lambda name: object())
    words = shlex.split(line)
    for name in sorted(paths, key=len, reverse=True):
        words = [word.replace(name, str(paths[name])) if word.startswith(name) else word for word in words]
    assert message in error_of(run_here(*words))
    assert not list(tmp_path.iterdir())


def test_lm_eval_without_the_harness(monkeypatch):
    monkeypatch.setattr("llama_jax.cli.lm_eval.find_spec", lambda name: None)
    said = error_of(run_here("lm-eval", "model", "--tasks", "arc_easy"))
    assert 'tasks need the lm-evaluation-harness; install it with pip install -e ".[lm-eval]"' in said
