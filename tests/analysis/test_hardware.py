"""Published figures by the names that JAX gives devices."""

import pytest

from llama_jax.analysis.hardware import BY_DEVICE_KIND, BY_NAME, GIB, find_hardware, hardware_by_name
from llama_jax.errors import ConfigError


@pytest.mark.parametrize(
    ("kind", "name", "teraflops", "gib", "terabytes_per_second"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM", 989, 80, 3.35),
        ("TPU v5 lite", "TPU v5e", 197, 16, 0.82),
        ("TPU v5", "TPU v5p", 459, 95, 2.76),
    ],
)
def test_devices_by_their_kind(kind, name, teraflops, gib, terabytes_per_second):
    found = find_hardware(kind)
    assert (found.name, found.memory) == (name, gib * GIB)
    assert found.flops == pytest.approx(teraflops * 1e12, rel=0.01)
    assert found.memory_bandwidth == pytest.approx(terabytes_per_second * 1e12, rel=0.03)


@pytest.mark.parametrize("kind", ["cpu", "", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H100", "TPU v9", "nvidia h200"])
def test_a_device_that_is_not_in_the_table_has_no_figures(kind):
    assert find_hardware(kind) is None


def test_figures_are_in_the_units_they_say():
    """A figure in tera or giga units, or one with sparsity, would lie outside."""
    for hardware in [*BY_DEVICE_KIND.values(), *BY_NAME.values()]:
        # FLOPs per byte of memory: accelerators of these years lie between 75 and 600.
        assert 75 < hardware.flops / hardware.memory_bandwidth < 600, hardware
        # Reading the whole memory takes some ten milliseconds.
        assert 0.01 < hardware.memory / hardware.memory_bandwidth < 0.1, hardware
        assert 0.03 < hardware.link_bandwidth / hardware.memory_bandwidth < 0.3, hardware
        # A network between machines or pods is an order of magnitude slower than the links inside.
        assert hardware.network_bandwidth is None or 8 < hardware.link_bandwidth / hardware.network_bandwidth < 100, hardware


def test_jax_knows_the_same_tpus():
    """JAX's own table, for its kernels: names and rounded figures, per core of the chip."""
    info = pytest.importorskip("jax._src.pallas.mosaic.tpu_info")
    if not hasattr(info, "chip_version_from_device_kind"):
        pytest.skip("this JAX keeps its table elsewhere")
    for kind, hardware in BY_DEVICE_KIND.items():
        if not kind.startswith("TPU"):
            continue
        chip = info.chip_version_from_device_kind(kind)
        cores = chip.num_physical_tensor_cores_per_chip if chip.supports_megacore else 1
        theirs = info.get_tpu_info_for_chip(chip, cores)
        assert hardware.flops == pytest.approx(cores * theirs.bf16_ops_per_second, rel=0.01)
        assert hardware.memory == pytest.approx(cores * theirs.hbm_capacity_bytes, rel=0.02)
        assert hardware.memory_bandwidth == pytest.approx(cores * theirs.mem_bw_bytes_per_second, rel=0.15)


@pytest.mark.parametrize(
    ("name", "product", "links", "domain", "network"),
    [
        ("h100", "H100 SXM", 450e9, 8, 50e9),
        ("tpu-v5p", "TPU v5p", 600e9, 8960, 6.25e9),
    ],
)
def test_hardware_by_name_and_what_connects_it(name, product, links, domain, network):
    found = hardware_by_name(name)
    assert (found.name, found.link_bandwidth, found.domain, found.network_bandwidth) == (product, links, domain, network)


@pytest.mark.parametrize(
    ("name", "near"),
    [("H200", "did you mean h200?"), ("tpu v5p", "did you mean tpu-v5p?"), ("banana", "table; the names are a100")],
)
def test_an_unknown_name_is_answered_with_the_nearest_and_all(name, near):
    with pytest.raises(ConfigError, match="is not in the table") as caught:
        hardware_by_name(name)
    assert near in str(caught.value)
    assert "tpu-v6e" in str(caught.value)
