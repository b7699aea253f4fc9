import dataclasses
import json
from dataclasses import replace

import pytest

import llama_jax
from llama_jax.config import LayerConfig
from llama_jax.data import ChatReading
from llama_jax.errors import TrainingError
from llama_jax.parallel.mesh import MeshSizes, parse_mesh
from llama_jax.runs.overrides import override
from llama_jax.runs.preflight import check_task
from llama_jax.runs.recipe import Recipe, differences, fit_to_data, to_dict
from llama_jax.runs.recipes import BUILT_IN, find, tiny
from llama_jax.training.preference_loss import PreferenceOptions


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_built_in_recipes_can_be_trained(name):
    recipe = find(name)
    for steps in (recipe.steps or 1, 1, 20):
        few = override(recipe, [f"steps={steps}"])
        assert few.optimizer.warmup(steps) <= steps / 10
    assert recipe.vocabulary == "given" or recipe.model.vocab_size >= 259


def test_changes_of_every_type():
    recipe = override(
        tiny(),
        [
            "steps=50",
            "z_loss=1e-4",
            "optimizer.learning_rate=0.5",
            "optimizer.name=muon",
            "model=stories-15m",
            "length=64",
            'prompts=["one", "two"]',
            "reading.separator=\\n\n",
            "optimizer.warmup_steps=3",
        ],
    )
    assert (recipe.steps, recipe.z_loss, recipe.optimizer.learning_rate, recipe.optimizer.name) == (50, 1e-4, 0.5, "muon")
    assert recipe.model == llama_jax.preset("stories-15m")
    assert recipe.prompts == ("one", "two")
    assert recipe.reading.separator == "\n\n"
    assert override(recipe, ["prompts=Once upon"]).prompts == ("Once upon",)
    assert override(recipe, ["model.n_layers=2", "model.tie_embeddings=false"]).model.n_layers == 2


def test_values_that_only_fit_together_come_in_any_order():
    changes = ["model.dim=96", "model.n_heads=6", "model.n_kv_heads=3", "model.head_dim=16"]
    for given in (changes, changes[::-1]):
        assert override(tiny(), given).model.n_heads == 6


def test_layers_are_given_as_json():
    found = override(tiny(), ['model.layers=[{"window": 64}, {"rope": "none"}]']).model.layers
    assert found == (LayerConfig(64), LayerConfig(rope="none"))


REFUSED = [
    ("tiny step=5", "", "'step' is not a setting of the recipe; did you mean 'steps'"),
    ("tiny learning_rate=5", "", "did you mean 'optimizer.learning_rate'"),
    ("tiny model.layers=1", "", "must be a JSON list of objects with window, rope, rope_theta"),
    ("tiny steps", "", "'steps' is not key=value"),
    ("tiny steps=1.5", "", r"steps='1\.5' must be an integer"),
    ("tiny z_loss=much", "", "z_loss='much' must be a number"),
    ("tiny model.tie_embeddings=1", "", "model.tie_embeddings='1' must be true or false"),
    ("tiny dtype=float64", "", "dtype='float64' must be one of float32, bfloat16"),
    ("tiny steps.more=1", "", "'steps' has no parts"),
    ("tiny optimizer=adamw", "", "optimizer cannot be set as a whole"),
    ("tiny model=llama-9b", "", "unknown preset 'llama-9b'"),
    ("tiny model=stories-15m model.dim=64", "", "whole and in parts"),
    ("tiny prompts=" + "[" * 5000, "", "must be a text, or several"),
    ("tiny epochs=2", "", r"steps=300 and epochs=2.0 exclude each other; set steps=0, or epochs=0"),
    ("tiny seed=4294967296", "", "seed=4294967296 must be at least 0 and at most 4294967295"),
    ("tiny length=300", "", "length=300 is above the model's context, max_seq_len=256"),
    ("tiny accumulate=3", "", "batch=16 must be a multiple of accumulate=3"),
    ("tiny validation=0", "", "validation=0.0 leaves nothing to train or to validate on"),
    ("tiny ema_decay=1", "", "ema_decay=1.0 must be at least 0 and below 1"),
    ("tiny optimizer.warmup_steps=300", "", "warmup_steps=300 must be below steps=300; set it lower"),
    ("tiny ROPE.kind=yarn", "", r"model.rope_scaling.kind needs model.rope_scaling.factor as well"),
    ("tiny ROPE.kind=yarn ROPE.factor=2", "", "needs original_max_seq_len"),
    ("tiny ROPE.kind=ntk ROPE.factor=2", "", r"model.rope_scaling.kind='ntk' must be one of linear, dynamic"),
    ("tiny ROPE.kind=linear ROPE.factor=2 ROPE.beta=1", "", r"'model.rope_scaling.beta' is not a setting .* has kind,"),
    ("tiny ROPE.kind=longrope ROPE.factor=2 ROPE.short_factor=a", "", r"short_factor='a' must be numbers"),
    ("tiny ROPE.kind=linear ROPE.factor=2 ROPE.beta_fast=2", "", r"does not read beta_fast=2.0"),
    # exact training
    ("tiny virtual_shards=4", "", "virtual_shards=4 is only for exact=true on text and chats; omit it"),
    ("tiny exact=true virtual_shards=6", "", "virtual_shards=6 must be a power of two, such as 8"),
    ("tiny exact=true batch=12", "", "batch=12 must be a multiple of virtual_shards=8 times accumulate=1"),
    ("tiny exact=true optimizer.name=muon", "", "exact=true needs adamw; .*name='muon'"),
    ("tiny exact=true lora.rank=2", "", "exact=true trains whole models; omit lora"),
    ("tiny exact=true", "tensor=2", "but tensor=2 divides sums within a row; use data and fsdp"),
    ("tiny exact=true virtual_shards=4", "data=2,fsdp=4", "virtual_shards=4 cannot be divided over 8 devices"),
    ("dpo exact=true", "", "exact=true supports text, chats and rewards, but not preferences; omit it"),
    ("grpo exact=true", "data=2", "exact=true samples on a single device, but the mesh is data=2"),
    # adapters
    ("sft lora.rank=2 optimizer.name=muon", "", "optimizer.name='muon' is for whole matrices"),
    ("sft quantize=int8", "", "quantize='int8' are for adapters and the frozen model"),
    ("sft optimizer.lora_plus=4", "", "lora_plus=4.0 and .* set lora.rank"),
    ("sft neftune=-1", "", "neftune=-1.0 must be at least 0"),
    ("sft lora.rank=2 quantize=int3", "", "quantize='int3' must be one of none, int8"),
    # chats, preferences and rewards
    ("sft vocabulary=bpe", "", "vocabulary='bpe' is learned from text, but the data are chats"),
    ("dpo preference.margin=1", "", r"margin=1.0 applies only to simpo, not to sigmoid; leave it out"),
    ("dpo chats=none", "", "preference needs data that are read as chats; set chats, for"),
    ("dpo", "pmap", "pmap does not train on preferences; use jit"),
    ("dpo", "context=2", "divides rows over context, but preferences need whole rows; use data, fsdp"),
    ("dpo z_loss=1e-4", "", "z_loss=0.0001 is a part of the default loss, which preference replaces"),
    ("distill", "pmap", "pmap does not train on a teacher's predictions; use jit"),
    ("distill z_loss=0.1", "", r"z_loss=0.1 is a part of the default loss, which distill replaces"),
    ("grpo chats.format=plain", "", "rewards are for prompts, and chats for conversations"),
    ("grpo z_loss=1e-4", "", "z_loss=0.0001 is a part of the default loss, which rewards replaces"),
    ("grpo batch=30", "", "batch=30 answers must be a multiple of rewards.group=8"),
    ("grpo batch=32", "data=8", r"= 4 prompts, which cannot be divided over data\*fsdp=8; use a multiple"),
    ("grpo", "context=2", "rewards need whole rows"),
    ("grpo rewards.answer=8 length=7", "", "rewards.answer=8 leaves no room for a prompt in length=7"),
    ("grpo rewards.group=1", "", "rewards.group=1 must be at least 2"),
    ("grpo rewards.truncated=drop", "", "rewards.truncated='drop' must be one of count, mask"),
    ("grpo rewards.temperature=0", "", "rewards.temperature=0.0 must be above 0"),
    ("grpo rewards.clip=2", "", "clip=2.0 must be at least 0 and below 1"),
]


@pytest.mark.parametrize(("line", "mesh", "message"), REFUSED, ids=[f"{line[:60]} {mesh}" for line, mesh, _ in REFUSED])
def test_recipes_that_cannot_be(line, mesh, message):
    name, *changes = line.replace("ROPE", "model.rope_scaling").split()
    backend = "pmap" if mesh == "pmap" else "jit"
    sizes = parse_mesh(mesh) if "=" in mesh else MeshSizes()
    with pytest.raises(llama_jax.UserError, match=message):
        check_task(override(find(name), changes), sizes, backend)


def test_parts_that_replace_the_loss():
    for name, changes, message in (
        ("dpo", {}, "loss and preference exclude each other"),
        ("sft", {"neftune": 5.0}, "neftune=5.0 is a part of the default loss, which loss replaces"),
    ):
        with pytest.raises(TrainingError, match=message):
            check_task(replace(find(name), loss=print, **changes), MeshSizes(), "jit")


def test_a_rope_scaling_is_made_of_its_parts():
    yarn = ["model.rope_scaling.factor=4", "model.rope_scaling.kind=yarn", "model.rope_scaling.original_max_seq_len=128"]
    recipe = override(tiny(), [*yarn, "model.rope_scaling.truncate=false"])
    scaling = llama_jax.RopeScaling("yarn", 4.0, original_max_seq_len=128, truncate=False)
    assert recipe.model.rope_scaling == scaling
    assert override(recipe, ["model.rope_scaling.factor=2"]).model.rope_scaling == dataclasses.replace(scaling, factor=2.0)
    other = override(recipe, ["model.rope_scaling.kind=linear", "model.rope_scaling.factor=2"]).model.rope_scaling
    assert other == llama_jax.RopeScaling("linear", 2.0)  # nothing is left of the fields of the other kind
    assert override(recipe, ["model.rope_scaling=none"]).model.rope_scaling is None
    lists = [f"model.rope_scaling.{name}_factor={[1.5] * (recipe.model.head_dim // 2)}" for name in ("short", "long")]
    longrope = override(tiny(), ["model.rope_scaling.kind=longrope", *yarn[::2], *lists]).model.rope_scaling
    assert longrope.long_factor == (1.5,) * (recipe.model.head_dim // 2)


def stored_form(recipe):
    """A recipe as a run writes it down."""
    return json.loads(json.dumps(to_dict(recipe)))


def test_differences_are_of_what_is_computed():
    recipe = tiny()
    stored = stored_form(recipe)
    assert differences(stored, stored) == []
    assert differences(stored, stored_form(replace(recipe, log_every=1))) == []
    longer = replace(recipe.model, max_seq_len=2 * recipe.model.max_seq_len)  # of the same file of --weights
    assert differences(stored, stored_form(replace(recipe, model=longer))) == []
    other = override(recipe, ["optimizer.b2=0.9", "steps=400"])
    assert differences(stored, stored_form(other)) == [
        "optimizer.b2: 0.95 in the folder, 0.9 now",
        "steps: 300 in the folder, 400 now",
    ]


def test_an_older_recipe_has_fewer_fields():
    """What a version did not write is as its default says, wherever in the recipe it is."""
    recipe = Recipe(model=tiny().model, steps=5, batch=2, length=8)
    stored = stored_form(recipe)
    shape = {f.name for f in dataclasses.fields(recipe.model) if f.default is dataclasses.MISSING} | {"head_dim"}
    older = {name: stored[name] for name in ("model", "steps", "batch", "length")}
    older["model"] = {name: value for name, value in stored["model"].items() if name in shape}
    assert len(older["model"]) < len(stored["model"])
    assert differences(older, stored) == []
    assert differences(older | {"optimizer": {"name": "adamw"}, "reading": {}}, stored) == []
    changed = stored_form(override(recipe, ["optimizer.b2=0.5", "lora.rank=2", "seed=1"]))
    found = differences(older, changed)
    assert "optimizer.b2: 0.95 in the folder, 0.5 now" in found
    assert "lora.rank: None in the folder, 2 now" in found
    assert {line.split(":")[0].split(".")[0] for line in found} == {"optimizer", "lora", "seed"}
    with_lora = changed | {"lora": {"rank": 2}}
    assert differences(with_lora, changed) == []


def test_a_recipe_from_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import replace\nfrom llama_jax.runs.recipes import tiny\n"
        "def quick():\n    return replace(tiny(), steps=40)\ndef other():\n    return 3\n"
        "def failing():\n    return {}['x']\ndef asking(more):\n    pass\n"
    )
    assert find(f"{file}:quick").steps == 40
    for name, message in (
        (f"{file}:slow", "has no function 'slow'"),
        (f"{file}:other", "returned int"),
        (f"{file}:failing", r"failing' failed with KeyError: 'x' \(.*mine.py, line 8, in failing"),
        (f"{file}:asking", "failed with TypeError: .*missing 1 required positional argument"),
        (f"{tmp_path}/none.py:quick", "does not exist"),
        ("tin", "no recipe 'tin'; use tiny, shakespeare"),
    ):
        with pytest.raises(TrainingError, match=message):
            find(name)


def test_preferences_on_the_command_line():
    found = find("dpo")
    assert (found.preference, found.chats) == (PreferenceOptions(), ChatReading())
    changed = override(found, ["preference.kind=simpo", "preference.beta=2", "preference.margin=1"])
    assert changed.preference == PreferenceOptions("simpo", 2.0, margin=1.0)


def test_an_exact_batch_fits_any_mesh():
    """Where the batch follows from the data it must not follow from the mesh, too."""
    recipe = replace(override(tiny(), ["exact=true", "batch=64"]), steps=0, epochs=1)
    found = [fit_to_data(recipe, mesh, 100, lambda length: 40) for mesh in (MeshSizes(), MeshSizes(8), MeshSizes(2, 4))]
    assert found[0].batch == 8
    assert found[0] == found[1] == found[2]


def test_exact_training_needs_the_same_threads_on_every_mesh(monkeypatch):
    """On a CPU XLA divides the sums of a matmul by its threads, whose number is fixed once JAX has started."""
    check_task(override(tiny(), ["exact=true"]), MeshSizes(), "jit")
    monkeypatch.setenv("PJRT_NPROC", "4096")
    message = r"XLA has \d+ threads here, but exact training on this CPU needs 4096 on every"
    with pytest.raises(TrainingError, match=message):
        check_task(override(tiny(), ["exact=true", "batch=4096", "virtual_shards=4096"]), MeshSizes(), "jit")
