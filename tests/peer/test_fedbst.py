"""FedBST against values recorded from a separate numpy program; its edges and mistakes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peer.methods import copl, fedbst
from peer.methods.dpsgd import mix

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "fedbst_golden.json").read_text())
CASES = {case["id"]: case for case in GOLDEN["cases"]}
DTYPES = [torch.float64, torch.float32]
in_both = pytest.mark.parametrize("dtype", DTYPES)


def close(actual: Tensor, expected: Any) -> None:
    """Within the tolerance the recorded values came with, by the precision of `actual`."""
    atol = 2e-6 if actual.dtype == torch.float64 else 2e-5
    torch.testing.assert_close(actual.detach().double(), torch.tensor(expected).double(), atol=atol, rtol=0)


def case(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return CASES[name]["inputs"], CASES[name]["expected"]


def where(mask: Tensor) -> list[int]:
    return mask.nonzero()[:, 0].tolist()


# Recorded values


def test_every_recorded_case_is_tested() -> None:
    elsewhere = {"fpl_cpl", "baseline_terms"}  # in test_prompt_baselines.py
    assert set(CASES) - elsewhere == {
        *("budget_3_clients", "estimate_and_select", "dual_filter", "uacp", "objective", "prototypes", "ensemble"),
        "aggregate",
    }
    assert GOLDEN["meta"]["threshold_slack"] == fedbst.SLACK


@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_recorded_quotas(integer: torch.dtype) -> None:
    inputs, expected = case("budget_3_clients")
    counts, size = torch.tensor(inputs["counts"], dtype=integer), inputs["n_train_total"]
    assert counts.shape == (inputs["n_clients"], inputs["n_classes"])
    quotas = {
        "quota_code_explore_period0": copl.allocate(counts, train_size=size),
        "quota_code_explore_period2": copl.allocate(counts, train_size=size, period=2),
        "quota_code_absent_zero": copl.allocate(counts, train_size=size, absent_class="zero"),
        "quota_paper_absent_zero": copl.allocate(counts, train_size=size, absent_class="zero", rounding="paper"),
    }
    for name, quota in quotas.items():
        assert quota.dtype == torch.int64
        assert quota.tolist() == expected[name], name
    assert fedbst.allocate(counts).tolist() == expected["quota_code_absent_zero"]  # nothing to explore
    nothing = expected["all_zero_counts"]
    assert copl.allocate(torch.tensor(nothing["counts"]), train_size=size).tolist() == nothing["quota"]


def test_quota_is_computed_in_whole_numbers() -> None:
    # 2 / 6 * 9 is a little above 3 in floating point, and its ceiling 4
    assert copl.allocate(torch.tensor([[2, 12], [4, 0]]))[:, 0].tolist() == [3, 6]


@in_both
def test_recorded_reliable_set_and_selection(dtype: torch.dtype) -> None:
    inputs, expected = case("estimate_and_select")
    assert inputs["q_conf"] == inputs["q_ent"] == 0.5
    p = torch.tensor(inputs["p"], dtype=dtype)
    close(p.amax(1), expected["max_prob"])
    close(copl.entropy(p), expected["entropy_nats"])
    assert where(fedbst.reliable_set(p)) == expected["reliable_indices"]
    check_counts(p, expected["counts"])
    check_selection(p, inputs["quota"], expected)
    for name in ("identical_rows", "single_sample"):
        few = torch.tensor(expected[name]["p"], dtype=dtype)
        assert where(fedbst.reliable_set(few)) == expected[name]["reliable_indices"]
        check_counts(few, expected[name]["counts"])
    tie = expected["tie"]
    check_selection(torch.tensor(tie["p"], dtype=dtype), tie["quota"], tie)


def check_counts(p: Tensor, expected: list[int]) -> None:
    counts = copl.class_counts(p)
    assert counts.dtype == torch.int32  # what travels: 4 C bytes
    assert counts.tolist() == expected


def check_selection(p: Tensor, quota: list[int], expected: dict[str, Any]) -> None:
    chosen, labels = fedbst.select(p, torch.tensor(quota))
    assert sorted(chosen.tolist()) == expected["selected"]
    assert [labels[chosen == index].item() for index in expected["selected"]] == expected["selected_labels"]
    assert where(copl.remaining(len(p), chosen)) == expected["remaining"]
    assert labels.tolist() == sorted(labels.tolist())


@in_both
def test_recorded_dual_filter(dtype: torch.dtype) -> None:
    inputs, expected = case("dual_filter")
    p = torch.tensor(inputs["p"], dtype=dtype)
    tau = {"tau_con": inputs["tau_con"], "tau_ent": inputs["tau_ent"]}
    close(p.amax(1), expected["max_prob"])
    close(copl.entropy(p), expected["entropy_nats"])
    for interval in fedbst.INTERVALS:
        for side in fedbst.SIDES:
            found = fedbst.dual_filter(p, **tau, interval=interval, entropy_side=side)
            assert where(found) == expected[f"{interval}_{side}"]
    for side in fedbst.SIDES:
        found = fedbst.dual_filter(p, **tau, entropy_side=side, entropy_unit="nats")
        assert where(found) == expected[f"halfwidth_{side}_nats"]
    assert where(fedbst.dual_filter(p)) == expected["halfwidth_above"]
    wide = fedbst.dual_filter(p, tau_con=0.3)
    assert wide.equal(fedbst.dual_filter(p, interval="threshold")) == expected["halfwidth_tau03_equals_threshold_tau02"]


@in_both
def test_recorded_uacp(dtype: torch.dtype) -> None:
    inputs, expected = case("uacp")
    logits = torch.tensor(inputs["logits"], dtype=dtype, requires_grad=True)
    loss = fedbst.uacp(logits)
    close(logits.softmax(1), expected["p"])
    close(loss, expected["loss"])
    (gradient,) = torch.autograd.grad(loss, logits)
    close(gradient, expected["grad"])
    close(gradient.sum(1), expected["grad_row_sums"])
    close(fedbst.uacp(logits - inputs["step"] * gradient), expected["loss_after_step"])

    nothing = torch.zeros(0, 3, dtype=dtype, requires_grad=True)
    loss = fedbst.uacp(nothing)
    assert loss.shape == ()
    assert loss.item() == expected["empty"]["loss"]
    loss.backward()
    assert nothing.grad is not None
    assert list(nothing.grad.shape) == expected["empty"]["grad_shape"]


@in_both
def test_recorded_objective(dtype: torch.dtype) -> None:
    inputs, expected = case("objective")
    labelled = torch.tensor(inputs["labelled_logits"], dtype=dtype, requires_grad=True)
    ambiguous = torch.tensor(inputs["ambiguous_logits"], dtype=dtype, requires_grad=True)
    labels = torch.tensor(inputs["labels"])
    loss = fedbst.objective(labelled, labels, ambiguous, weight=inputs["lam"])
    close(loss, expected["total"])
    assert loss.equal(fedbst.objective(labelled, labels, ambiguous))  # the default is the paper's 0.001
    close(fedbst.objective(labelled, labels, ambiguous, weight=0), expected["ce"])
    close(fedbst.uacp(ambiguous), expected["uacp"])
    for logits, key in ((labelled, "grad_labelled"), (ambiguous, "grad_ambiguous")):
        close(torch.autograd.grad(loss, logits, retain_graph=True)[0], expected[key])
    close(fedbst.objective(labelled, labels, ambiguous[:0]), expected["no_ambiguous_total"])
    with pytest.raises(ValueError, match="does not train"):  # "skip the client's update"
        fedbst.objective(labelled[:0], labels[:0], ambiguous)


@in_both
def test_recorded_prototypes(dtype: torch.dtype) -> None:
    inputs, expected = case("prototypes")
    features, labels = torch.tensor(inputs["features"], dtype=dtype), torch.tensor(inputs["pred"])
    classes = inputs["n_classes"]
    units = torch.nn.functional.normalize(features, dim=1)
    close(fedbst._class_sums(units, labels, classes), expected["sum"])
    assert torch.bincount(labels, minlength=classes).tolist() == expected["count"]
    found, mask = fedbst.prototypes(features, labels, classes)
    assert (found.dtype, mask.dtype) == (dtype, torch.bool)
    close(found, expected["prototype"])
    assert mask.int().tolist() == expected["mask"]
    raw = fedbst._class_sums(features, labels, classes)  # the rejected reading, without unit length first
    close(raw, expected["raw_sum_variant"]["sum"])
    assert not found.equal(torch.nn.functional.normalize(raw, dim=1))
    close(torch.nn.functional.normalize(raw, dim=1), expected["raw_sum_variant"]["prototype"])
    found, mask = fedbst.prototypes(features[:0], labels[:0], classes)
    close(found, expected["no_sample"]["prototype"])
    assert mask.int().tolist() == expected["no_sample"]["mask"]


@in_both
def test_recorded_ensemble(dtype: torch.dtype) -> None:
    inputs, expected = case("ensemble")
    tensors = [torch.tensor(inputs[name], dtype=dtype) for name in ("features", "text", "prototype")]
    mask, scale, alpha = torch.tensor(inputs["mask"]).bool(), inputs["scale"], inputs["alpha"]
    found = fedbst.ensemble(*tensors, mask, scale=scale)
    assert found.dtype == dtype
    close(found, expected["p"])
    assert found.equal(fedbst.ensemble(*tensors, mask, scale=scale, alpha=alpha, vis_scale=scale))
    text = fedbst.ensemble(*tensors, mask, scale=scale, alpha=1)
    close(text, expected["p_text"])
    close(fedbst.ensemble(*tensors, mask, scale=scale, alpha=0), expected["p_vis"])
    reverse = fedbst.ensemble(*tensors, mask, scale=scale, alpha=1 - alpha)
    close(reverse, expected["alpha_on_visual_p"])
    for answer, key in ((text, "text"), (found, "ensemble"), (reverse, "alpha_on_visual")):
        assert answer.argmax(1).tolist() == expected[f"argmax_{key}"]
    one = expected["one_class_mask"]
    mask = torch.tensor(one["mask"]).bool()
    close(fedbst.ensemble(*tensors, mask, scale=scale), one["p"])
    close(fedbst.ensemble(*tensors, mask, scale=scale, alpha=0), one["p_vis"])
    empty = expected["empty_mask"]
    mask = torch.tensor(empty["mask"]).bool()
    close(fedbst.ensemble(*tensors, mask, scale=scale), empty["p"])
    assert fedbst.ensemble(*tensors, mask, scale=scale, alpha=0.3).equal(text)


@in_both
def test_recorded_aggregate(dtype: torch.dtype) -> None:
    inputs, expected = case("aggregate")
    previous = {"prompt": torch.tensor(inputs["previous"], dtype=dtype)}
    uploads = [
        (float(size), {"prompt": torch.tensor(update, dtype=dtype)})
        for size, update in zip(inputs["sizes"], inputs["updates"], strict=True)
    ]
    close(mix(previous, uploads, own_weight=0)["prompt"], expected["aggregated"])
    close(mix(previous, uploads[:2], own_weight=0)["prompt"], expected["client_2_absent"])
    nothing = [(0.0, update) for _, update in uploads]
    close(mix(previous, nothing, own_weight=0)["prompt"], expected["all_sizes_zero"])


def test_recorded_learning_rate() -> None:
    inputs, expected = case("aggregate")
    assert inputs["horizon"] == 5 * 10
    for done, rate in expected["lr_at_epoch"].items():
        round, epoch = divmod(int(done), 10)
        found = copl.learning_rate(inputs["lr"], 1 + round, epoch, every=5, epochs=10)
        assert found == pytest.approx(rate, abs=2e-6)
        assert copl.learning_rate(inputs["lr"], 6 + round, epoch, every=5, epochs=10) == found  # it restarts


# Edges


def test_class_reliable_nowhere_is_explored_more_at_each_relabelling() -> None:
    counts = torch.tensor([[3, 0], [1, 0]])
    quotas = [copl.allocate(counts, train_size=100, period=period)[:, 1].tolist() for period in range(4)]
    assert quotas == [[7, 7], [13, 13], [19, 19], [25, 25]]  # 100 / 16 = 6.25 a period, rounded up


def test_client_that_is_late_gets_its_part_and_leaves_the_others_theirs() -> None:
    counts = torch.tensor([[4, 0, 2], [0, 0, 0], [2, 0, 0]])  # the second did not report
    own = torch.tensor([3, 1, 0])
    # M = ceil(8 / 3) = 3; class 0: ceil(3 * 3 / (6 + 3)); class 1: ceil(1 * 3 / 1)
    assert copl.allocate_late(own, counts, train_size=40).tolist() == [1, 3, 0]
    nobody = torch.tensor([[4, 0, 2], [0, 0, 0]])
    assert copl.allocate_late(torch.tensor([1, 0, 0]), nobody, train_size=40, period=1)[1].item() == 4  # 80 / 24
    assert not copl.allocate_late(own, torch.zeros_like(counts), train_size=40).any()


def test_quota_of_0_takes_none_however_sure() -> None:
    p = torch.eye(3)
    assert fedbst.select(p, torch.tensor([0, 0, 5]))[0].tolist() == [2]
    chosen, labels = fedbst.select(p, torch.zeros(3, dtype=torch.int64))
    assert (chosen.shape, chosen.dtype, labels.dtype) == ((0,), torch.int64, torch.int64)
    assert copl.remaining(3, chosen).all()


def test_prediction_on_a_tie_is_the_lower_class() -> None:
    p = torch.tensor([[0.4, 0.4, 0.2], [0.2, 0.4, 0.4]])
    chosen, labels = fedbst.select(p, torch.tensor([9, 9, 9]))
    assert (chosen.tolist(), labels.tolist()) == ([0, 1], [0, 1])


def test_sample_at_the_median_entropy_is_not_reliable() -> None:
    p = torch.tensor([[0.6, 0.2, 0.2], [0.55, 0.45, 0.0], [0.4, 0.3, 0.3]])  # the first is the most confident
    assert not fedbst.reliable_set(p).any()


def test_among_many_equals_the_lower_index_is_taken() -> None:
    p = torch.tensor([[0.7, 0.3]]).repeat(1000, 1)
    assert fedbst.select(p, torch.tensor([300, 0]))[0].equal(torch.arange(300))


@pytest.mark.parametrize(("beyond", "ambiguous"), [(5e-7, True), (2e-6, False)])
def test_bounds_of_the_dual_filter_have_a_little_slack(beyond: float, ambiguous: bool) -> None:
    p = torch.tensor([[0.7 + beyond, 0.3 - beyond], [0.5, 0.5]], dtype=torch.float64)
    assert fedbst.dual_filter(p).tolist() == [ambiguous, True]
    uncertainty = copl.entropy(p)[1].item()
    for side, sign in (("above", 1), ("below", -1)):
        tau = uncertainty + sign * beyond
        found = fedbst.dual_filter(p, tau_ent=tau, entropy_side=side, entropy_unit="nats")
        assert found[1] == ambiguous


def test_client_without_samples() -> None:
    nothing = torch.zeros(0, 3)
    assert fedbst.reliable_set(nothing).shape == fedbst.dual_filter(nothing).shape == (0,)
    assert copl.class_counts(nothing).tolist() == [0, 0, 0]
    assert len(fedbst.select(nothing, torch.tensor([1, 1, 1]))[0]) == 0


def test_one_class_alone_has_no_entropy() -> None:
    p = torch.ones(4, 1)
    assert not fedbst.reliable_set(p).any()
    assert not fedbst.dual_filter(p, tau_con=0.5).any()
    assert fedbst.dual_filter(p, tau_con=0.5, entropy_side="below").all()


def test_uacp_on_a_tie_gives_the_gradient_to_one_class() -> None:
    logits = torch.zeros(1, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(fedbst.uacp(logits), logits)
    assert gradient.tolist() == [[0.1875, -0.0625, -0.0625, -0.0625]]


def test_prototypes_come_from_the_reliable_else_from_the_selected() -> None:
    inputs, expected = case("estimate_and_select")
    p = torch.tensor(inputs["p"])
    selected = torch.tensor([3]), torch.tensor([2])
    chosen, labels = fedbst.prototype_samples(p, *selected)
    assert (chosen.tolist(), labels.tolist()) == (expected["reliable_indices"], [0, 1, 2, 0])
    assert fedbst.prototype_samples(p, *selected, source="selected") == selected
    alike = torch.full((5, 3), 1 / 3)
    assert fedbst.prototype_samples(alike, *selected) == selected
    nothing = selected[0][:0], selected[1][:0]
    chosen, labels = fedbst.prototype_samples(alike, *nothing)
    assert not fedbst.prototypes(torch.ones(5, 2)[chosen], labels, 3)[1].any()


def test_temperature_of_the_visual_stream_is_its_own() -> None:
    features, text = torch.tensor([[1.0, 0.0]]), torch.eye(2)
    prototypes = torch.tensor([[0.6, 0.8], [0.8, 0.6]])
    found = fedbst.ensemble(features, text, prototypes, torch.ones(2).bool(), scale=10.0, alpha=0.0, vis_scale=5.0)
    close(found, [[1 / (1 + 2.718281828**1.0), 1 / (1 + 2.718281828**-1.0)]])


def test_ambiguous_samples_come_round_and_round() -> None:
    order = torch.tensor([5, 3, 9, 1, 7])
    batches = [fedbst.ambiguous_batch(order, step, 2).tolist() for step in range(5)]
    assert batches == [[5, 3], [9, 1], [7, 5], [3, 9], [1, 7]]
    assert fedbst.ambiguous_batch(order, 3, 64).sort().values.tolist() == [1, 3, 5, 7, 9]
    assert len(fedbst.ambiguous_batch(order[:0], 3, 64)) == 0


def test_labels_are_made_anew_in_the_first_round_and_every_fifth_after() -> None:
    assert [round for round in range(1, 21) if copl.relabels(round, 5)] == [1, 6, 11, 16]
    assert all(copl.relabels(round, 1) for round in range(1, 5))


# Mistakes


@pytest.mark.parametrize("wrong", [torch.ones(3), torch.ones(2, 0), torch.tensor([[0.5, float("nan")]])])
def test_probabilities_that_are_none(wrong: Tensor) -> None:
    for function in (fedbst.reliable_set, fedbst.dual_filter):
        with pytest.raises(ValueError, match=r"must be \(samples, classes\), and all of it finite"):
            function(wrong)
    with pytest.raises(ValueError, match="finite"):
        fedbst.select(wrong, torch.ones(2).long())


@pytest.mark.parametrize("wrong", [[1, 2], [1, -1, 2]])
def test_quota_that_is_none(wrong: list[int]) -> None:
    with pytest.raises(ValueError, match=r"must hold 3 numbers \(classes\) of 0 or more"):
        fedbst.select(torch.eye(3), torch.tensor(wrong))


@pytest.mark.parametrize("wrong", [torch.ones(3).long(), torch.ones(2, 3), -torch.ones(2, 3).long()])
def test_counts_that_are_none(wrong: Tensor) -> None:
    with pytest.raises(ValueError, match=r"must be \(clients, classes\), whole numbers of 0 or more"):
        copl.allocate(wrong)


def test_unknown_choices_list_what_there_is() -> None:
    p, counts = torch.eye(3), torch.ones(2, 3).long()
    for name, allowed in (("interval", "halfwidth"), ("entropy_side", "above"), ("entropy_unit", "normalized")):
        with pytest.raises(ValueError, match=f"{name} is 'x'; choose one of {allowed}"):
            fedbst.dual_filter(p, **{name: "x"})  # type: ignore[arg-type]
    for name, allowed in (("absent_class", "explore"), ("rounding", "code")):
        with pytest.raises(ValueError, match=f"{name} is 'x'; choose one of {allowed}"):
            copl.allocate(counts, **{name: "x"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="source is 'x'; choose one of reliable, selected"):
        fedbst.prototype_samples(p, torch.zeros(0).long(), torch.zeros(0).long(), source="x")


def test_numbers_out_of_range() -> None:
    with pytest.raises(ValueError, match=r"alpha is 1\.5; it must lie in 0\.\.1"):
        fedbst.ensemble(torch.eye(2), torch.eye(2), torch.eye(2), torch.ones(2).bool(), scale=1, alpha=1.5)
    for rate in (0.0, 1.5):
        with pytest.raises(ValueError, match="joining rate"):
            copl.joining([1, 2], 1, rate=rate, seed=0)
