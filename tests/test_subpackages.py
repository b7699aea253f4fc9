"""Imports only go down: a file may use the floors below its own, and files of its own subpackage. Functions take few
arguments. A name of a type has one meaning."""

import ast
import inspect
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import llama_jax

PACKAGE = Path(llama_jax.__file__).parent
FLOOR = {
    "errors": 0,
    "settings": 0.5,
    "storage": 0.5,  # what is small is read from it, and the kernel for CPUs is a file
    "config": 1,  # on one floor subpackages do not know each other: the operations know no configuration
    "ops": 1,
    "model": 2,
    "inference": 3,
    "training": 3,
    "nnx_module": 3,  # the functions of a model with its parameters inside, for trainers of others
    "tokenizers": 3,
    "data": 4,  # reads text through a tokenizer
    "parallel": 4,  # lays out what is trained and decoded
    "export": 4,  # names the trees of both
    "analysis": 5,  # looks at the programs of all subpackages below
    "formats": 5,  # finds the tokenizer beside the weights, and reads each device's share of a laid-out model
    "verify": 6,  # compares what is read with what others make of the same file
    "evaluation": 5.5,  # measures what is loaded; the training loop evaluates by it
    "runs": 6,  # the training loop: reads data, lays it out, writes checkpoints
    "serving": 6.5,  # runs what is below as a service, with clocks and threads
    "evaluation/text_model.py": 6.7,  # asks a model in texts, by the engine
    "evaluation/lm_eval_adapter.py": 6.7,
    "cli": 7,
    "__main__": 8,
}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def imports(path: Path) -> set[str]:
    """Rooms of this package that a file names in an import, wherever in the file it stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module] if node.module != "llama_jax" else [f"llama_jax.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("llama_jax.")}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path):
    name = path.relative_to(PACKAGE).as_posix()
    subpackage = name.split("/")[0].removesuffix(".py")
    floor = FLOOR.get(name, FLOOR[subpackage])
    for used in imports(path) - {subpackage}:
        assert FLOOR[used] < floor, f"{name} (floor {floor}) uses {used}"


CORE = ("ops", "model", "training", "inference", "parallel")
MOST_ARGUMENTS = 7
# What a user writes as keywords, where a bundle would only be one more name to import.
MORE_ARGUMENTS = {
    "inference/generate.py generate": 9,  # model, prompts, limit, and the bundles of sampling, cache, computation and draft
    "inference/generate.py stream": 10,  # those of generate, and max_chunks
    "model/logits.py logits_and_activations": 8,  # those of forward, and hooks
    "model/cache.py attend_gathered": 8,  # as `attend_paged`
    "inference/decode.py begin_decode": 8,  # prefilled prompts, their tokens and settings, computation and sharding
    # Those of `attend`, with chunks and sinks in the place of a mask as arrays, and the options that choose kernels.
    "ops/attention/dispatch.py attend": 8,
    "ops/attention/paged.py attend_paged": 9,
    "ops/attention/paged.py attend_on_device": 8,
    "ops/attention/paged_blocks.py attend_by_blocks": 8,
    # Three matrices, and the options that choose kernels.
    "ops/layers.py feed_forward": 8,
    "ops/moe.py mixture_of_experts": 8,
    "ops/moe.py _chosen_experts": 8,
    "ops/moe.py all_experts": 8,
}


def test_functions_of_the_core_take_few_arguments():
    found = {}
    for path in FILES:
        name = path.relative_to(PACKAGE).as_posix()
        if name.split("/")[0] not in CORE:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                given = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                count = len(given) - (given[:1] in (["self"], ["cls"]))
                if count > MOST_ARGUMENTS:
                    found[f"{name} {getattr(node, 'name', 'lambda')}"] = count
    assert found == MORE_ARGUMENTS


def test_subpackages_are_reached_from_the_package():
    code = "import llama_jax; llama_jax.tokenizers.load_tokenizer; llama_jax.formats.huggingface.config_from_dict"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_public_face_is_what_it_says():
    for name in llama_jax.__all__:
        assert getattr(llama_jax, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'lama'"):
        llama_jax.lama  # noqa: B018
    assert set(llama_jax.__all__) <= set(dir(llama_jax))


def test_annotations_of_the_public_face_resolve():
    """As command lines, validators and documentation tools read them."""
    for name in llama_jax.__all__:
        value = getattr(llama_jax, name)
        if isinstance(value, type):
            typing.get_type_hints(value)
        elif callable(value):
            inspect.signature(value, eval_str=True)


def test_the_name_of_a_type_has_one_meaning():
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_the_name_of_a_constant_of_the_core_has_one_meaning():
    places: dict[str, list[str]] = {}
    for path in FILES:
        name = path.relative_to(PACKAGE).as_posix()
        if name.split("/")[0] not in CORE:
            continue
        for node in ast.parse(path.read_text()).body:
            targets = (
                node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
            )
            if not isinstance(getattr(node, "value", None), ast.Call) or "TypeVar" not in ast.unparse(node.value):
                for target in targets:
                    for one in getattr(target, "elts", [target]):
                        if isinstance(one, ast.Name) and not one.id.startswith("_"):
                            places.setdefault(one.id, []).append(name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_files_do_not_import_each_other_in_circles():
    """Wherever in a file an import stands, for types as well; what a package's `__init__` passes on is not counted."""
    names = {path: path.relative_to(PACKAGE).as_posix()[:-3].replace("/", ".").removesuffix(".__init__") for path in FILES}
    reached = {name: imported_files(path, set(names.values())) - {name} for path, name in names.items()}
    for _ in reached:  # in as many steps as there are files
        further = {name: used.union(*(reached[one] for one in used)) for name, used in reached.items()}
        if further == reached:
            break
        reached = further
    within = {name: frozenset({name, *(one for one in used if name in reached[one])}) for name, used in reached.items()}
    assert {circle for circle in within.values() if len(circle) > 1} == set()


def imported_files(path: Path, names: set[str]) -> set[str]:
    """The files of this package, by their names without it, that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("llama_jax."):
            module = node.module.removeprefix("llama_jax.")
            found |= {f"{module}.{one.name}" if f"{module}.{one.name}" in names else module for one in node.names}
    return found & names
