"""Step times at measured and published points, and the shapes that no coefficients may break."""

from __future__ import annotations

import json
from importlib.resources import files
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module

from adapters.simulator.costs import Architecture, Chip, Fitted, KvBytes, Roofline
from harness.errors import ConfigError
from harness.plugins import build
from tests.simulated import backend

PROJECT = Path(__file__).parents[2]
MODELS = sorted(path.stem for path in (PROJECT / "conf/model").glob("*.yaml"))
CHIPS = sorted(path.stem for path in (PROJECT / "conf/chip").glob("*.yaml"))
NAMED = [name for name in CHIPS if name not in ("fitted", "inferred_b")]
SHIPPED = sorted(
    path.name.removesuffix(".json")
    for path in (files("adapters.simulator") / "coefficients").iterdir()
)
HAND: dict[str, Any] = {
    "cards": 8,
    "prefill": {"t0_s": 0.1, "a_s": 1e-3, "b_s": 1e-6},
    "decode": {"d0_s": 0.01, "d1_s": 1e-3, "d2_s": 1e-6, "d3_s": 2e-3},
}
MEASURED_ON = {
    "deepseek_v3": "h200",
    "qwen3_235b": "h200",
    "minimax_m2_5": "h200",
    "llama_3_1_70b": "h100",
    "deepseek_v4_pro": "b200",
}


def configured(*overrides: str) -> Any:
    with initialize_config_module("conf", version_base="1.3"):
        return compose("run", ["backend=[]", *overrides])


def chip(model: str, name: str, *overrides: str) -> Any:
    return build(configured(f"model={model}", f"chip@chip_a={name}", *overrides), "chip_a")


def hand(**changes: dict[str, float]) -> Fitted:
    """The coefficients written by hand, with some of them changed."""
    return Fitted(HAND | {part: HAND[part] | values for part, values in changes.items()})


# ---- fitted: measured points


def test_v3_prefill_meets_its_measured_points() -> None:
    fitted = chip("deepseek_v3", "fitted")
    measured_s = {(4096, 0): 0.241, (16384, 0): 0.948, (65536, 0): 5.320, (4096, 57344): 0.480}
    for chunk, seconds in measured_s.items():
        assert fitted.prefill_s([chunk]) == pytest.approx(seconds, rel=0.02)


def test_v3_decode_meets_its_measured_points() -> None:
    fitted = chip("deepseek_v3", "fitted")
    for context, seconds in ((4096, 0.0357), (65536, 0.0792)):
        assert fitted.decode(64, 64 * context)[0] == pytest.approx(seconds, rel=0.04)


def test_v3_extends_as_measured() -> None:
    """Steps of 1 to 256 tokens on 64K, batch 1: within 11% of the step."""
    fitted = chip("deepseek_v3", "fitted")
    one_s = 0.0152
    measured_s = {8: 20.7, 16: 24.6, 32: 31.9, 64: 40.1, 100: 46.4, 256: 62.7}
    for tokens, milliseconds in measured_s.items():
        step_s = one_s + fitted.extend_s(1, tokens, 65_536)
        assert step_s == pytest.approx(milliseconds / 1e3, rel=0.11)


@pytest.mark.parametrize(
    ("batch", "context", "step_ms", "longer_ms"),
    [
        (16, 4096, 24.8, {8: 1.2, 16: 2.5, 32: 6.8, 64: 12.2, 100: 14.1, 256: 22.6}),
        (16, 65_536, 35.8, {8: 1.6, 16: 3.3, 32: 8.5, 64: 15.7, 100: 19.6, 256: 36.9}),
        (64, 4096, 35.7, {8: 1.1, 16: 2.3, 32: 3.4, 64: 4.7, 100: 7.9, 256: 16.0}),
        (64, 65_536, 79.2, {8: 1.5, 16: 3.1, 32: 5.1, 64: 8.2, 100: 13.4, 256: 30.3}),
    ],
)
def test_v3_extends_inside_a_batch_as_its_kernels_say(
    batch: int, context: int, step_ms: float, longer_ms: dict[int, float]
) -> None:
    """Kernels of a decode step with so many rows more, and attention of a prefill's: within 7%."""
    fitted = chip("deepseek_v3", "fitted")
    for tokens, milliseconds in longer_ms.items():
        ours_ms = step_ms + 1e3 * fitted.extend_s(batch, tokens, context)
        assert ours_ms == pytest.approx(step_ms + milliseconds, rel=0.07)


# ---- fitted: shapes


def test_the_equations_by_hand() -> None:
    fitted = hand()
    assert fitted.cards == 8
    assert fitted.prefill_s([(100, 0), (10, 500)]) == pytest.approx(
        0.1 + (0.1 + 1e-6 * 100 * 50) + (0.01 + 1e-6 * 10 * 505)
    )
    assert fitted.decode(4, 1000) == pytest.approx((0.01 + 0.004 + 0.004 + 0.001, 4e-6, inf))
    # 5 rows more read 0.005 and 0.002 more, and compute 0.005: reading is the slower.
    assert fitted.extend_s(4, 6, 100) == pytest.approx(0.007 + 1e-6 * (6 * 103 - 100.5))
    assert hand(prefill={"a_s": 0.01}).extend_s(4, 6, 100) == pytest.approx(
        0.05 + 1e-6 * (6 * 103 - 100.5)
    )


def test_chunks_add_up_to_the_whole() -> None:
    fitted = hand(prefill={"t0_s": 0.0})
    pieces = sum(fitted.prefill_s([(1000, cached)]) for cached in range(0, 10_000, 1000))
    assert pieces == pytest.approx(fitted.prefill_s([(10_000, 0)]))


def test_a_chip_may_be_faster_than_the_one_measured() -> None:
    slow, fast = Fitted(HAND), Fitted(HAND, prefill_speed=3.0, decode_speed=2.0)
    assert fast.prefill_s([(100, 0)]) == pytest.approx(slow.prefill_s([(100, 0)]) / 3)
    assert fast.decode(4, 1000)[:2] == pytest.approx([x / 2 for x in slow.decode(4, 1000)[:2]])
    assert fast.extend_s(4, 6, 100) == pytest.approx(slow.extend_s(4, 6, 100) / 2)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_step_is_never_cheaper_than_one_of_a_smaller_batch(name: str) -> None:
    fitted = Fitted(name)
    steps_s = [fitted.decode(batch, 0)[0] for batch in range(1, 3000)]
    assert steps_s == sorted(steps_s)
    assert steps_s[0] > 0


def test_a_fit_that_bends_down_stays_where_it_was() -> None:
    falling = hand(decode={"d1_s": -1e-3, "d3_s": 0.0, "d0_s": 0.1})
    assert falling.decode(1, 0)[0] == falling.decode(500, 0)[0] == pytest.approx(0.099)
    dented = hand(decode={"d1_s": 1e-3, "d3_s": -4e-3, "d0_s": 0.1})
    assert dented.decode(4, 0)[0] == dented.decode(1, 0)[0] < dented.decode(100, 0)[0]


@pytest.mark.parametrize("name", SHIPPED)
def test_what_is_shipped_says_where_it_is_from_and_how_good_it_is(name: str) -> None:
    path = files("adapters.simulator") / "coefficients" / f"{name}.json"
    found = json.loads(path.read_bytes())
    assert found["source"].startswith("aiconfigurator ")
    assert found["unmeasured"] == []
    for part in ("prefill", "decode"):
        assert found["errors"][part]["mean"] < 0.11
        assert found["errors_held_out"][part]["mean"] < 0.11
    assert json.loads(json.dumps(Fitted(name).numbers))["source"] == found["source"]


# ---- roofline


def roofline(**changes: Any) -> Roofline:
    """A chip and a model of round numbers: 1 ms to compute a token, 2 ms to read the weights."""
    values: dict[str, Any] = {
        "name": "round", "cards": 2, "tflops": 1.0, "memory_gb": 1.0, "bandwidth_tb_s": 1.0,
        "interconnect_gb_s": 1e9, "eta_compute": 1.0, "expert_cost": 1.0, "eta_memory": 1.0,
        "t0_s": 0.0, "model": model(),
    }  # fmt: skip
    return Roofline(**(values | changes))


def model(**changes: Any) -> Architecture:
    values: dict[str, Any] = {
        "parameters": 4e9, "active_parameters": 1e9, "bytes_per_parameter": 1.0, "layers": 10,
        "hidden": 100, "attention_flops": 0.0, "kv_bytes": 0.001, "kv_heads": 8, "experts": 4,
        "experts_per_token": 1,
    }  # fmt: skip
    return Architecture(**(values | changes))


def test_a_step_takes_the_slower_of_computing_and_reading() -> None:
    assert roofline().prefill_s([(1000, 0)]) == pytest.approx(1.0)
    assert roofline(t0_s=0.5).prefill_s([(600, 0), (400, 9)]) == pytest.approx(1.5)
    slow = roofline(bandwidth_tb_s=1e-6)
    assert slow.prefill_s([(1000, 0)]) == pytest.approx(4e9 / 2e6)
    # Per card 10 layers x 2 x 100 x 2 bytes, and each byte once on the ring of two.
    linked = roofline(interconnect_gb_s=1e-3)
    assert linked.prefill_s([(1000, 0)]) == pytest.approx(1.0 + 1000 * 4000 / 1e6)
    assert roofline(cards=1, interconnect_gb_s=1e-3).prefill_s([(1000, 0)]) == pytest.approx(2.0)


def test_attention_is_computed_for_each_pair_of_tokens() -> None:
    chip = roofline(model=model(attention_flops=1e6))
    assert chip.prefill_s([(1000, 500)]) == pytest.approx(1.0 + 1e6 * 1000 * 1000 / 2e12)


def test_a_batch_reads_the_experts_that_it_activates() -> None:
    """Of 4e9 parameters are all 4e9 in experts: one token reads a quarter, many read all."""
    reading = roofline(tflops=1e6)
    assert reading.decode(1, 0)[0] == pytest.approx(0.5e-3)
    assert reading.decode(2, 0)[0] == pytest.approx(2e-3 * (1 - 0.75**2))
    assert reading.decode(1000, 0)[0] == pytest.approx(2e-3)
    dense = model(active_parameters=4e9, experts=1)
    assert roofline(tflops=1e6, model=dense).decode(1, 0)[0] == pytest.approx(2e-3)


def test_experts_may_cost_more_than_dense_layers() -> None:
    half = model(parameters=2.5e9)  # 2e9 in experts, 0.5e9 not
    assert roofline(model=half, expert_cost=3.0).prefill_s([(1000, 0)]) == pytest.approx(2.0)


def test_latent_caches_are_read_whole_by_every_card() -> None:
    for kv_heads, share in ((1, 1), (2, 2), (8, 4)):
        chip = roofline(cards=4, tflops=1e9, model=model(kv_bytes=1e6, kv_heads=kv_heads))
        assert chip.decode(5, 100)[1] == pytest.approx(5 * 1e6 / share / 1e12)


@pytest.mark.parametrize("batch", [1, 7, 64, 512.5])
@pytest.mark.parametrize(
    ("flops", "kv_bytes"), [(1e6, 1.0), (1e3, 1e3), (0.0, 1e3), (1e6, 1e6), (1e5, 1e5)]
)
def test_a_line_of_decode_steps_holds_until_it_says(
    batch: float, flops: float, kv_bytes: float
) -> None:
    chip = roofline(t0_s=1e-3, model=model(attention_flops=flops, kv_bytes=kv_bytes))
    context = 10.0 * batch
    for _ in range(4):
        first_s, growth_s, steps = chip.decode(batch, context)
        assert steps >= 1
        for step in {0, 1, int(min(steps, 1e6)) // 2, int(min(steps, 1e6)) - 1}:
            if step < steps:
                later_s = chip.decode(batch, context + step * batch)[0]
                assert later_s == pytest.approx(first_s + step * growth_s)
        if steps == inf:
            return
        beyond_s = chip.decode(batch, context + steps * batch)[0]
        assert beyond_s > (first_s + steps * growth_s) * (1 - 1e-12)
        context += steps * batch


def test_a_chip_extends_at_no_more_than_a_prefill_costs() -> None:
    for name in ("h200", "h20"):
        v3 = chip("deepseek_v3", name)
        for batch in (1, 16, 64):
            for tokens in (2, 8, 64, 256):
                longer_s = v3.extend_s(batch, tokens, 65_536)
                assert 0 < longer_s < v3.prefill_s([(tokens, 65_536)])
            assert v3.extend_s(batch, 1, 65_536) == 0


@pytest.mark.parametrize("cards", [1, 3, 8, 40])
def test_any_number_of_cards_is_an_instance(cards: int) -> None:
    many = chip("llama_3_1_70b", "h200", f"chip_a.cards={cards}")
    more = chip("llama_3_1_70b", "h200", f"chip_a.cards={cards + 1}")
    assert many.cards == cards
    assert more.decode(8, 8000)[0] < many.decode(8, 8000)[0]


def test_the_roofline_of_v3_on_h200_lies_near_its_measured_points() -> None:
    v3 = chip("deepseek_v3", "h200")
    measured_s = {(4096, 0): 0.241, (16384, 0): 0.948, (65536, 0): 5.320, (4096, 57344): 0.480}
    for chunk, seconds in measured_s.items():
        assert v3.prefill_s([chunk]) == pytest.approx(seconds, rel=0.21)
    for context, seconds in ((4096, 0.0357), (65536, 0.0792)):
        assert v3.decode(64, 64 * context)[0] == pytest.approx(seconds, rel=0.18)


@pytest.mark.parametrize("name", MEASURED_ON)
def test_a_roofline_is_within_a_factor_of_what_is_measured(name: str) -> None:
    """Steps of common sizes: 1.5, but 2 for V4-Pro, where small products are slow on B200."""
    measured, bound = chip(name, "fitted"), chip(name, MEASURED_ON[name])
    factor = 2.0 if name == "deepseek_v4_pro" else 1.5
    for chunk in ((4096, 0), (16384, 0), (32768, 0), (4096, 57344)):
        ratio = bound.prefill_s([chunk]) / measured.prefill_s([chunk])
        assert 1 / factor < ratio < factor, chunk
    for batch, context in ((64, 4096), (32, 16384), (64, 65536)):
        ratio = bound.decode(batch, batch * context)[0] / measured.decode(batch, batch * context)[0]
        assert 1 / factor < ratio < factor, (batch, context)


@pytest.mark.parametrize(
    ("name", "published_gbps"),
    [("minimax_m2_5", 59.9), ("qwen3_235b", 33.4), ("mimo_v2_flash", 4.66)],
)
def test_kv_caches_are_made_at_the_published_rate(name: str, published_gbps: float) -> None:
    """arXiv 2604.15039, 32K on 8 H200; whether in fp8 or bf16 it does not say: between the two."""
    kv: KvBytes = build(configured(f"model={name}"), "model.kv")
    fp8_gbps = 8e-9 * kv.of(32_768) / chip(name, "h200").prefill_s([(32_768, 0)])
    assert 0.98 * fp8_gbps < published_gbps < 2 * fp8_gbps


# ---- the configuration


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", CHIPS)
def test_every_chip_serves_every_model(model: str, name: str) -> None:
    if name not in NAMED and model == "mimo_v2_flash":
        with pytest.raises(ConfigError, match=r"has not been measured.*chip@chip_a=h200"):
            chip(model, name)
        return
    if name in NAMED and model == "hybrid_1t":
        with pytest.raises(ConfigError, match=r"chip\.model is None"):  # it is not published
            chip(model, name)
        return
    made = chip(model, name)
    assert json.loads(json.dumps(made.numbers))["cards"] == 8
    assert isinstance(made, Chip)
    assert 0 < made.decode(1, 1000)[0] < made.prefill_s([(8192, 0)])


@pytest.mark.parametrize("name", NAMED)
def test_every_named_chip_says_whose_numbers_it_has(name: str) -> None:
    text = (PROJECT / "conf/chip" / f"{name}.yaml").read_text()
    assert "NVIDIA's numbers: " in text
    assert "read 20" in text


def test_chip_b_decodes_faster_and_prefills_alike() -> None:
    a, b = chip("deepseek_v3", "fitted"), chip("deepseek_v3", "inferred_b")
    assert a.decode(9, 9000)[0] / b.decode(9, 9000)[0] == pytest.approx(1.41)
    assert a.prefill_s([(9000, 0)]) == b.prefill_s([(9000, 0)])


def test_eighty_long_prompts_of_v4_pro_are_about_23_gigabytes() -> None:
    """Published: about 23 GB for 80 concurrent requests of 64K."""
    kv: KvBytes = build(configured("model=deepseek_v4_pro"), "model.kv")
    assert 80 * kv.of(65_536) == pytest.approx(23e9, rel=0.05)
    assert kv.blocks(4444e6, 100) == pytest.approx(10_000)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("chip_a.prefill_speed=0", "chip.prefill_speed is 0"),
        ("chip_a.decode_speed=fast", "chip.decode_speed is 'fast'"),
        ("chip_a.coefficients=mine", "mine cannot be read.*deepseek_v3_h200"),
        ("chip_a.coefficients=here/mine.json", "here/mine.json cannot be read"),
        ("chip_a.coefficients={cards: 8}", "coefficients.prefill is None: give t0_s, a_s, b_s"),
        ("chip_a.coefficients={}", "coefficients.cards is None"),
    ],
)
def test_impossible_coefficients_are_refused(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        chip("deepseek_v3", "fitted", override)


@pytest.mark.parametrize(
    ("part", "changes", "words"),
    [
        ("prefill", {"a_s": -1}, "coefficients.a_s is -1"),
        ("prefill", {"t0_s": None}, "coefficients.prefill.t0_s is None"),
        ("decode", {"d2_s": -1}, "coefficients.d2_s is -1"),
        ("decode", {"d0_s": -1.0}, "s for a batch of 1: give more than 0"),
    ],
)
def test_impossible_steps_are_refused(part: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        hand(**{part: changes})


def test_a_file_of_coefficients_is_read_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(HAND))
    assert Fitted(str(path)).prefill_s([(9, 9)]) == Fitted(HAND).prefill_s([(9, 9)])
    for text, words in (("{", "is no JSON"), ("[]", "give a JSON object")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            Fitted(str(path))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("chip_a.cards=0", "chip.cards is 0"),
        ("chip_a.tflops=0", "chip.tflops is 0"),
        ("chip_a.bandwidth_tb_s=-1", "chip.bandwidth_tb_s is -1"),
        ("chip_a.interconnect_gb_s=0", "chip.interconnect_gb_s is 0"),
        ("chip_a.memory_gb=0", "chip.memory_gb is 0"),
        ("chip_a.eta_compute=1.5", "chip.eta_compute is 1.5"),
        ("chip_a.eta_memory=0", "chip.eta_memory is 0"),
        ("chip_a.expert_cost=0.5", "chip.expert_cost is 0.5"),
        ("chip_a.t0_s=-1", "chip.t0_s is -1"),
        ("chip_a.model=null", "chip.model is None"),
        ("model.architecture.parameters=0", "model.architecture.parameters is 0"),
        ("model.architecture.active_parameters=1e13", "active_parameters is"),
        ("model.architecture.active_parameters=1e9", "active_parameters is 1000000000.0"),
        ("model.architecture.experts_per_token=999", "experts_per_token is 999"),
        ("model.architecture.experts_per_token=256", "active_parameters is 37000000000.0"),
        ("model.architecture.kv_heads=0", "kv_heads is 0"),
        ("model.kv.per_token=0", "kv_bytes is 0"),
    ],
)
def test_an_impossible_chip_or_model_is_refused(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        chip("deepseek_v3", "h200", override)


def test_a_cache_of_no_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.kv.per_token is 0"):
        KvBytes(0)


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("tokens", [4096, 16_384, 100_000])
def test_no_step_takes_tokens_in_for_more_than_their_prefill(name: str, tokens: int) -> None:
    """Recomputed after a preemption: thousands of tokens, far from what decode is measured at."""
    fitted = Fitted(name)
    assert fitted.extend_s(8, tokens, 0) <= fitted.prefill_s([(tokens, 0)])
    assert fitted.extend_s(8, tokens, 0) > 0.5 * fitted.prefill_s([(tokens, 0)])


def test_a_model_that_does_not_fit_is_said_to() -> None:
    """880 GB of weights on 8 cards of 48 GB, and 300 GB of caches beside them."""
    said = backend("pdd", "chip@chip_a=l40s", "chip@chip_b=h200").describe().warnings
    assert any("P: the model's weights are" in each for each in said)
    assert any(each.startswith("RLD: ") for each in said)
    assert any(each.startswith("MD: ") and "KV caches" in each for each in said)
    assert not backend("pdd").describe().warnings


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.kv.fixed=inf", r"model\.kv\.fixed is inf"),
        ("model.kv.per_token=1e-320", r"model\.kv\.per_token is 1e-320"),
        ("backend.pdd.relay.pool.block_tokens=20000000000", r"decode\.block_tokens is 2"),
        ("backend.pdd.prefill.P.cards=80000000000", r"prefill\.cards is 8"),
    ],
)
def test_what_no_machine_can_hold_is_refused(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        backend("pdd", override)
