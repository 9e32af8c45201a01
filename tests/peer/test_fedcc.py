"""FedCC's equations against values recorded from a separate, literal numpy program; their edges and mistakes."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peer.methods import fedcc

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "fedcc_golden.json").read_text())
CASES = {case["id"]: case for case in GOLDEN["cases"]}
PSEUDO = [name for name in CASES if name.startswith(("f01", "f02", "f03", "f04"))]
HERE = ("f05", "f06", "f07", "f08", "f09", "f10", "f11")
ELSEWHERE = {
    "f12_partition": "test_partition",
    "f13_metrics": "test_unknown",
    "c01_costs": "test_models",
}
DTYPES = [torch.float64, torch.float32]


def close(actual: Tensor, expected: Any, dtype: torch.dtype = torch.float64) -> None:
    """Within the tolerances the recorded values came with (they are rounded to 6 decimals)."""
    atol = 1e-6 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(actual.double(), torch.tensor(expected, dtype=torch.float64), atol=atol, rtol=0)


def recorded(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    case = next(case for key, case in CASES.items() if key.startswith(name))
    return case["inputs"], case["expected"]


def tensor(values: Any, dtype: torch.dtype) -> Tensor:
    """Numbers in nested lists, None being NaN."""
    if isinstance(values, list) and (not values or not isinstance(values[0], list)):
        return torch.tensor([math.nan if value is None else value for value in values], dtype=dtype)
    return torch.stack([tensor(value, dtype) for value in values])


def settings_of(inputs: dict[str, Any]) -> dict[str, float]:
    return {"smoothing": inputs["delta"], "majority_threshold": inputs["threshold"]}


def ids(mask: Tensor) -> list[int]:
    return mask.nonzero()[:, 0].tolist()


# Recorded values


def test_every_recorded_case_is_tested() -> None:
    baselines = {name for name in CASES if name.startswith("b0")}  # test_fedcc_baselines
    here = {name for name in CASES if name.startswith(HERE)}
    assert set(CASES) == {*PSEUDO, *here, *baselines, *ELSEWHERE}
    assert len(CASES) == 19
    assert len(PSEUDO) + len(here) == 11
    defaults = GOLDEN["defaults"]
    assert defaults["delta"] == fedcc.SMOOTHING
    assert defaults["threshold"] == fedcc.MAJORITY_THRESHOLD
    assert defaults["zero_mass"] == fedcc.NO_MASS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PSEUDO)
def test_recorded_pseudo_labels(name: str, dtype: torch.dtype) -> None:
    inputs, expected = recorded(name)
    given = settings_of(inputs)
    probe_logits, public_logits = tensor(inputs["logits_x0"], dtype), tensor(inputs["logits_xu"], dtype)
    p, h = fedcc.known(probe_logits), fedcc.entropy(fedcc.known(public_logits))
    close(p, expected["p"], dtype)
    close(h, expected["H"], dtype)
    assert ids(fedcc.majority(p, given["majority_threshold"])) == expected["C_J"]
    close((1 - inputs["delta"]) * p + inputs["delta"] / len(p), expected["p_smooth"], dtype)

    w_l, w_u = fedcc.trust_weights(p, **given)
    close(w_l, expected["w_l"], dtype)
    assert w_u == pytest.approx(expected["w_u"], abs=1e-6)
    close(torch.minimum(w_l, h.double()), expected["w_x"], dtype)
    close(fedcc.alpha(p, torch.zeros(1), **given), [expected["alpha_base"]], dtype)
    close(fedcc.alpha(p, h, **given), expected["alpha"], dtype)

    labels = fedcc.pseudo_labels(public_logits, probe_logits, **given)
    assert labels.dtype == dtype
    close(labels, expected["pseudo_label"], dtype)
    trusted = labels[:, :-1].sum(1) > 0
    assert labels[trusted, :-1].argmax(1).tolist() == torch.tensor(expected["m"])[trusted].tolist()


def test_recorded_closed_form_of_one_class_bias() -> None:
    for row in recorded("f02")[1]["closed_form"]:
        p = torch.eye(row["C"], dtype=torch.float64)[0]
        w_l, w_u = fedcc.trust_weights(p)
        close(w_l, row["w_l"])
        assert w_u == pytest.approx(row["w_u"], abs=1e-6)
        close(fedcc.alpha(p, torch.zeros(1)), [row["alpha_max"]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_uniform_probe_over_many_classes(dtype: torch.dtype) -> None:
    inputs, expected = recorded("f04")
    p = torch.full((inputs["uniform_p_over"],), 1 / inputs["uniform_p_over"], dtype=dtype)
    w_l, w_u = fedcc.trust_weights(p)
    assert ids(fedcc.majority(p)) == expected["uniform"]["C_J"] == []
    close(w_l, expected["uniform"]["w_l"], dtype)
    assert w_u == pytest.approx(expected["uniform"]["w_u"], abs=1e-6)
    close(fedcc.alpha(p, tensor(inputs["uniform_H"], dtype)), expected["uniform"]["alpha"], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_boundary_of_the_majority(dtype: torch.dtype) -> None:
    inputs, expected = recorded("f05")
    given = settings_of(inputs)
    for values, row in zip(inputs["p"], expected["rows"], strict=True):
        p = tensor(values, dtype)
        owned = fedcc.majority(p, inputs["threshold"])
        assert ids(owned) == row["J"]
        assert ids(~owned & (p > 0)) == row["N"]
        assert ids(p == 0) == row["S"]
        w_l, w_u = fedcc.trust_weights(p, **given)
        close(w_l, row["w_l"], dtype)
        assert w_u == pytest.approx(row["w_u"], abs=1e-6)
        close(fedcc.alpha(p, torch.tensor([inputs["H"]], dtype=dtype), **given), [row["alpha"]], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_refinement(dtype: torch.dtype) -> None:
    inputs, expected = recorded("f06")
    labelled = tensor(inputs["labelled_logits"], dtype).requires_grad_()
    public = tensor(inputs["unlabelled_logits"], dtype).requires_grad_()
    labels, pseudo = torch.tensor(inputs["labels"]), tensor(expected["pseudo_label"], dtype)
    loss = fedcc.refine_loss(labelled, labels, public, pseudo, unlabelled_weight=inputs["lam"])
    close(loss.detach(), expected["L"], dtype)
    assert loss.equal(fedcc.refine_loss(labelled, labels, public, pseudo))  # the default is the recorded weight
    loss.backward()
    assert labelled.grad is not None
    assert public.grad is not None
    close(labelled.grad, expected["grad_labelled"], dtype)
    close(public.grad, expected["grad_unlabelled"], dtype)

    alone = fedcc.refine_loss(labelled, labels, public, pseudo, unlabelled_weight=0).detach()
    close(alone, expected["L_l"], dtype)
    close((loss.detach() - alone) / inputs["lam"], expected["L_u"], dtype)
    for row, value in enumerate(expected["per_sample_u"]):
        one = fedcc.refine_loss(labelled, labels, public[[row]], pseudo[[row]], unlabelled_weight=1).detach()
        close(one - alone, value, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("space", fedcc.SPACES)
def test_recorded_synchronisation(space: str, dtype: torch.dtype) -> None:
    inputs, expected = recorded("f07")
    teacher, logits = tensor(inputs["teacher"], dtype), tensor(inputs["student_logits"], dtype).requires_grad_()
    loss = fedcc.sync_loss(teacher, logits, space=space)
    close(loss.detach(), expected[f"{space}_mean"], dtype)
    for row, value in enumerate(expected[space]):
        close(fedcc.sync_loss(teacher[[row]], logits[[row]], space=space).detach(), value, dtype)
    loss.backward()
    assert logits.grad is not None
    if space == "padded":
        close(logits.grad, expected["grad_padded_mean"], dtype)
        assert loss.equal(fedcc.sync_loss(teacher, logits))  # it is the default
    else:
        assert not logits.grad[:, -1].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_synchronisation_leaves_out_what_is_not_valid(dtype: torch.dtype) -> None:
    inputs, expected = recorded("f07")
    teacher, logits = tensor(inputs["teacher"], dtype), tensor(inputs["student_logits"], dtype)
    valid = torch.tensor(inputs["valid"])
    close(fedcc.sync_loss(teacher[valid], logits[valid]), expected["padded_mean_over_valid"], dtype)
    mass = 1 - logits.softmax(1)[:, -1]
    close(-mass.log(), expected["minus_log_known_mass"], dtype)


def check_teacher(predictions: Tensor, expected: dict[str, Any], dtype: torch.dtype) -> fedcc.Teacher:
    found = fedcc.teach(predictions)
    close(found.weights, expected["mu"], dtype)
    close(found.target, expected["target"], dtype)
    assert found.target.dtype == dtype
    assert found.valid.tolist() == expected["valid"]
    target, valid = fedcc.aggregate(predictions)
    assert target.equal(found.target)
    assert valid.equal(found.valid)
    raw = (found.weights[:, :, None] * predictions.double().nan_to_num()).sum(0)
    close(raw, tensor(expected["y_tilde"], torch.float64).nan_to_num().tolist(), dtype)  # NaN: no usable peer
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_aggregation(dtype: torch.dtype) -> None:
    inputs, expected = recorded("f08")
    predictions = tensor(inputs["predictions"], dtype)
    found = check_teacher(predictions, expected, dtype)
    assert found.target.argmax(1).tolist() == expected["argmax"]
    assert not found.dropped.any()
    plain = predictions.mean(0)[:, :-1]
    plain = plain / plain.sum(1, keepdim=True)
    close(plain, expected["uniform_mu_target"], dtype)
    assert plain.argmax(1).tolist() == expected["uniform_mu_argmax"] != expected["argmax"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", recorded("f09")[0])
def test_recorded_edges_of_aggregation(name: str, dtype: torch.dtype) -> None:
    inputs, expected = recorded("f09")
    predictions = tensor(inputs[name], dtype)
    found = check_teacher(predictions, expected[name], dtype)
    assert found.dropped.tolist() == predictions.isnan().any(2).sum(1).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_inference(dtype: torch.dtype) -> None:
    inputs, expected = recorded("f10")
    logits = tensor(inputs["client_logits"], dtype)
    assert fedcc.infer(logits).tolist() == expected["prediction"]
    close(fedcc.scores(logits).softmax(1), expected["posterior"], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_round(dtype: torch.dtype) -> None:
    inputs, expected = recorded("f11")
    given = settings_of(inputs)
    probes, start, end = (tensor(inputs[key], dtype) for key in ("logits_x0", "theta0_logits", "theta_logits"))
    for client, row in enumerate(expected["clients"]):
        p = fedcc.known(probes[client])
        w_l, w_u = fedcc.trust_weights(p, **given)
        assert ids(fedcc.majority(p, inputs["threshold"])) == row["C_J"]
        close(w_l, row["w_l"], dtype)
        assert w_u == pytest.approx(row["w_u"], abs=1e-6)
        close(fedcc.alpha(p, fedcc.entropy(fedcc.known(start[client])), **given), row["alpha"], dtype)
        pseudo = fedcc.pseudo_labels(start[client], probes[client], **given)
        close(pseudo, row["pseudo_label"], dtype)
        trusted = pseudo[:, :-1].sum(1) > 0
        assert pseudo[trusted, :-1].argmax(1).tolist() == torch.tensor(row["m"])[trusted].tolist()
        label = torch.zeros(1, 4, dtype=dtype), torch.tensor([0])
        public = fedcc.refine_loss(*label, end[client], pseudo, unlabelled_weight=1) - math.log(4)
        close(public, row["L_u"], dtype)
        close(end[client].softmax(1), row["upload"], dtype)
    found = check_teacher(end.softmax(2), expected, dtype)
    for client, value in enumerate(expected["sync_loss_next_round"]):
        close(fedcc.sync_loss(found.target, end[client]), value, dtype)


# Choices, edges and mistakes


def test_label_shares_can_decide_the_majority_classes() -> None:
    logits = torch.tensor([[0.0, 6.0, 2.0, 0.0]]).double()
    probe = torch.tensor([0.5, 0.5, -9.0, 0.0]).double()
    prior = torch.tensor([0.98, 0.0, 0.02])  # class 2 has exactly 2 %, which is no majority
    by_probe, by_prior = (fedcc.pseudo_labels(logits, probe, prior=given) for given in (None, prior))
    assert by_probe[0].nonzero()[:, 0].tolist() == [1, 3]
    assert by_prior[0].nonzero()[:, 0].tolist() == [0, 3]
    p, h = fedcc.known(probe), fedcc.entropy(fedcc.known(logits))
    assert [fedcc.trust_weights(p, prior=given)[1] for given in (None, prior)] == [math.log(2), math.log(3)]
    assert by_prior[0, 0].item() == fedcc.alpha(p, h, prior=prior).item() < by_probe[0, 1].item()


@pytest.mark.parametrize(
    "bad",
    [
        [0.5, 0.5, math.inf],
        [0.7, 0.4, -0.1],
        [0.5, 0.3, 0.202],
        [0.5, 0.3, 0.198],
        [0.0, 0.0, 0.0],
        [math.nan, 0.5, 0.5],
    ],
)
def test_a_row_that_is_no_distribution_is_dropped_alone(bad: list[float]) -> None:
    good = torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.2, 0.2]])
    other = torch.tensor([[0.1, 0.8, 0.1], [0.0, 0.9, 0.1]])
    predictions = torch.stack([good, other])
    predictions[0, 1] = torch.tensor(bad)
    found = fedcc.teach(predictions)
    assert found.dropped.tolist() == [1, 0]
    assert found.weights[:, 1].tolist() == [0, 1]
    assert found.valid.all()
    close(found.target[1], [0.0, 1.0], torch.float32)
    torch.testing.assert_close(found.target[0], fedcc.teach(torch.stack([good, other])).target[0])


def test_a_row_that_is_off_by_rounding_stays() -> None:
    assert not fedcc.teach(torch.tensor([[[0.5, 0.3, 0.2009], [0.5, 0.3, 0.1991]]])).dropped.any()
    halves = (4 * torch.randn(3, 50, 201, generator=torch.Generator().manual_seed(0))).softmax(2).half()
    assert not fedcc.teach(halves).dropped.any()


def test_without_peers_there_is_no_valid_target() -> None:
    found = fedcc.teach(torch.empty(0, 2, 4))
    assert not found.valid.any()
    close(found.target, [[1 / 3] * 3] * 2, torch.float32)


def test_teacher_and_pseudo_labels_are_constants() -> None:
    draw = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1)).requires_grad_()
    teacher, _ = fedcc.aggregate(draw.softmax(2))
    pseudo = fedcc.pseudo_labels(draw[0], draw[1, 0])
    assert not teacher.requires_grad
    assert not pseudo.requires_grad
    soft = draw[1].softmax(1)
    model = torch.zeros(4, 5, requires_grad=True)
    loss = fedcc.sync_loss(draw[2, :, :4].softmax(1), model)
    loss += fedcc.refine_loss(model, torch.zeros(4).long(), model, soft)
    loss.backward()
    assert draw.grad is None
    assert model.grad is not None


def test_losses_survive_certainty() -> None:
    logits = torch.tensor([[200.0, 0.0, -200.0]], requires_grad=True)
    pseudo = torch.tensor([[0.0, 0.5, 0.5]])
    loss = fedcc.refine_loss(logits, torch.tensor([1]), logits, pseudo)
    loss = loss + fedcc.sync_loss(torch.tensor([[0.0, 1.0]]), logits)
    assert loss.item() == pytest.approx(200 + 0.2 * 300 + 200)
    loss.backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"public_logits": torch.ones(4)}, r"public_logits have shape \(4,\)"),
        ({"probe_logits": torch.ones(1, 4)}, r"probe_logits \(1, 4\); they must be \(samples, classes \+ 1\) and"),
        ({"probe_logits": torch.ones(3)}, r"probe_logits \(3,\)"),
        ({"public_logits": torch.ones(2, 2), "probe_logits": torch.ones(2)}, r"probe has shape \(1,\).* 2 classes"),
        ({"prior": torch.ones(4)}, r"the probe has shape \(3,\) and the prior \(4,\)"),
        ({"smoothing": 0.0}, "smoothing is 0.0; it must lie between 0 and 1"),
        ({"public_logits": torch.full((2, 4), math.nan)}, "not finite: it has diverged"),
        ({"probe_logits": torch.full((4,), math.inf)}, "not finite: it has diverged"),
    ],
)
def test_mistakes_in_pseudo_labels_are_explained(changes: dict[str, Any], message: str) -> None:
    given = {"public_logits": torch.ones(2, 4), "probe_logits": torch.ones(4)} | changes
    with pytest.raises(ValueError, match=message):
        fedcc.pseudo_labels(given.pop("public_logits"), given.pop("probe_logits"), **given)


@pytest.mark.parametrize("combine", [fedcc.teach, fedcc.aggregate, fedcc.scores, fedcc.infer])
@pytest.mark.parametrize("shape", [(2, 4), (2, 3, 2), (1, 2, 3, 4)])
def test_what_peers_say_must_have_three_dimensions(combine: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"they must be \(peers, samples, classes \+ 1\), with at least 2 classes"):
        combine(torch.ones(shape))


def test_diverged_model_is_named_at_inference() -> None:
    logits = torch.zeros(4, 2, 3)
    logits[2, 1, 0] = math.nan
    with pytest.raises(ValueError, match="peer 2 of 4 gives logits that are not finite"):
        fedcc.infer(logits)


@pytest.mark.parametrize(
    ("teacher", "logits", "space", "message"),
    [
        ((2, 3), (2, 3), "padded", r"the teacher has shape \(2, 4\), the student's logits have \(2, 3\)"),
        ((2, 3), (2, 3), "restricted", r"the teacher has shape \(2, 3\), the student's logits have \(2, 2\)"),
        ((2, 3), (1, 4), "padded", r"both must be \(samples, classes\)"),
        ((0, 3), (0, 4), "padded", "at least one sample"),
        ((2, 3), (2, 4), "half", "space is 'half'; choose one of padded, restricted"),
    ],
)
def test_mistakes_in_synchronisation_are_explained(
    teacher: tuple[int, ...], logits: tuple[int, ...], space: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fedcc.sync_loss(torch.ones(teacher), torch.ones(logits), space=space)
