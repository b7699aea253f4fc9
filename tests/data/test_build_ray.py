"""The same build as a Ray Data job: with two workers of this machine the same bytes. Needs ray."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llama_jax.data.build_corpus import CORPUS_NAME, BuildOptions, build
from llama_jax.formats.loading import bundled

PAGE = Path(__file__).parents[2] / "docs" / "clusters" / "build_ray.py"


@pytest.mark.slow
@pytest.mark.nightly
def test_ray_builds_the_same_bytes(tmp_path):
    pytest.importorskip("ray", reason="the recipe needs ray")
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(5):
        stories = [f"Story {n} of {number}: once upon a time there were {n % 17} llamas on a hill." for n in range(300)]
        (texts / f"{number}.txt").write_text("<|endoftext|>".join(stories))
    options = BuildOptions(drop_duplicates=True)
    build(texts, tmp_path / "here", bundled(), options=options, processes=1)
    command = [sys.executable, PAGE, texts, "--out", tmp_path / "there", "--tokenizer", bundled(), "--cpus", 2]
    where = os.pathsep.join([str(PAGE.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": where, "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [*map(str, command), "--drop-duplicates"], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"[\d,]+ tokens of [\d,]+ documents", done.stdout)
    assert [path.name for path in (tmp_path / "there").iterdir()] == [CORPUS_NAME]
    assert (tmp_path / "there" / CORPUS_NAME).read_bytes() == (tmp_path / "here" / CORPUS_NAME).read_bytes()

    broken = texts / "broken.jsonl"
    broken.write_text("{")
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 1
    assert "was built with other files, sources" in done.stderr
