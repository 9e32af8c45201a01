"""What FedBST is compared with, against values recorded from a separate numpy program."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peer.methods import copl, prompt_baselines

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


@in_both
def test_recorded_fpl_and_cpl(dtype: torch.dtype) -> None:
    inputs, expected = case("fpl_cpl")
    p = torch.tensor(inputs["p"], dtype=dtype)
    chosen, labels = copl.select(p, torch.full((p.shape[1],), inputs["k"]))
    assert chosen.tolist() == expected["fpl_selected"]
    assert labels.tolist() == expected["fpl_labels"]

    close(p.amax(1).quantile(inputs["q_intra"]), expected["cpl_threshold"])
    everything = prompt_baselines.candidate_sets(p, q=inputs["q_intra"], beta=0.0)
    assert everything.int().tolist() == expected["intra"]
    everything = prompt_baselines.candidate_sets(p, q=1.0, beta=inputs["beta"])  # below 1, so no class is cut off
    assert (everything & torch.tensor(expected["intra"]).bool()).int().tolist() == expected["candidates"]
    found = prompt_baselines.candidate_sets(p, q=inputs["q_intra"], beta=inputs["beta"])
    assert found.int().tolist() == expected["candidates"]
    kept = found.any(1)
    assert kept.int().tolist() == expected["rows_kept"]
    assert sorted(prompt_baselines.admitted(p, found).tolist()) == where(kept)
    close(prompt_baselines.candidate_loss(p[kept].log(), found[kept]), expected["cc_loss_on_kept"])


@in_both
def test_recorded_terms_of_the_baselines(dtype: torch.dtype) -> None:
    inputs, expected = case("baseline_terms")
    similarity = torch.tensor(inputs["sim_patches_by_prompts"], dtype=dtype)
    plan = prompt_baselines.transport(
        similarity, mass=inputs["gamma"], epsilon=inputs["reg"], tolerance=inputs["tol"], most=inputs["iters"]
    )
    assert plan.equal(prompt_baselines.transport(similarity))
    close(plan, expected["transport"])
    close(plan.sum(), expected["transport_mass"])
    close(plan.sum(0), expected["column_sums"])
    close(plan.sum(1), expected["row_sums"])
    close((plan * similarity).sum(), expected["score"])
    batch = torch.stack([similarity, similarity]).unsqueeze(0)
    close(prompt_baselines.transport(batch)[0, 1], expected["transport"])

    prox = {name: torch.tensor(inputs["prox"][name], dtype=dtype, requires_grad=True) for name in ("w", "w_global")}
    term = prompt_baselines.proximal(prox["w"], prox["w_global"], mu=inputs["prox"]["mu"])
    close(term, expected["prox_value"])
    term.backward()
    assert prox["w"].grad is not None
    close(prox["w"].grad, expected["prox_grad"])
    assert prox["w_global"].grad is None

    lfa = {name: torch.tensor(inputs["lfa"][name], dtype=dtype) for name in ("z", "keys", "values", "text_logits")}
    added = prompt_baselines.local_attention(lfa["z"], lfa["keys"], lfa["values"])
    close(lfa["text_logits"] + added, expected["lfa_logits"])
    assert not prompt_baselines.local_attention(lfa["z"], lfa["keys"][:0], lfa["values"][:0]).any()


def test_cpl_takes_no_more_than_its_share_of_a_class() -> None:
    p = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
    both, first = torch.ones(4, 2).bool(), torch.tensor([[True, False]]).expand(4, 2)
    assert prompt_baselines.admitted(p, both, most=1).tolist() == [0, 1]  # the second for its next class
    assert prompt_baselines.admitted(p, first, most=3).tolist() == [0, 1, 2]


def test_client_without_samples() -> None:
    assert prompt_baselines.candidate_sets(torch.zeros(0, 3)).shape == (0, 3)


def test_sample_without_a_candidate() -> None:
    with pytest.raises(ValueError, match="no candidate label"):
        prompt_baselines.candidate_loss(torch.zeros(2, 3), torch.tensor([[True, False, False], [False] * 3]))
