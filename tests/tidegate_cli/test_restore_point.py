import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidegate_contract.folder import Folder
from tidegate_contract.identity import LineageClaim
from tidegate_contract.publish import claim_lineage

RUN_ID = "6f2f4a63-5f3c-4b3e-9d28-0a4a6e8a8f11"
OTHER_RUN_ID = "0c0a5f0e-0000-4000-8000-000000000000"


@pytest.fixture
def nodes(a_run: Any, a_step: Any) -> list[Path]:
    """The remote folder and two nodes of two ranks: 10 is durable, 20 sealed, 30 on node 0 only."""
    remote, first, second = a_run(), a_run("node0"), a_run("node1")
    a_step(remote, 10, ranks=range(4), world_size=4)
    for step in (10, 20, 30):
        a_step(first, step, ranks=(0, 1), world_size=4, tier="local")
    for step in (10, 20):
        a_step(second, step, ranks=(2, 3), world_size=4, tier="local")
    return [remote, first, second]


def ask(call: Any, nodes: list[Path], *words: object) -> dict[str, Any]:
    remote, *local = nodes
    options = [word for path in local for word in ("--local", path)]
    answer = call("restore-point", "--remote", remote, *options, *words, "--json")
    document: dict[str, Any] = json.loads(answer.out)
    assert answer.code == (0 if document["chosen"] else 1)
    return document


def sources(document: dict[str, Any]) -> list[tuple[str, list[int]]]:
    return [(source["tier"], source["ranks"]) for source in document["chosen"]["sources"]]


def test_restore_point_of_the_whole_job_is_the_newest_sealed(nodes: list[Path], call: Any) -> None:
    document = ask(call, nodes)
    assert document["chosen"]["step"] == 20
    assert sources(document) == [("local", [0, 1]), ("local", [2, 3])]
    (newer,) = document["refused"]
    assert newer["step"] == 30
    assert newer["why"] == "ranks [2, 3] have no whole local copy and it is not durable"


def test_restore_point_after_a_lost_node_mixes_the_tiers(nodes: list[Path], call: Any) -> None:
    document = ask(call, nodes[:2])
    assert document["chosen"]["step"] == 10
    assert sources(document) == [("local", [0, 1]), ("remote", [2, 3])]


@pytest.mark.parametrize(
    ("words", "want"),
    [
        (("--ranks", "4"), [("local", [0, 1]), ("local", [2, 3])]),
        (("--ranks-per-node", "2"), [("local", [0, 1]), ("local", [2, 3])]),
        (("--ranks", "8"), [("remote", [0, 1, 2, 3, 4, 5, 6, 7])]),
        (("--ranks", "3"), [("remote", [0, 1, 2])]),
    ],
    ids=["as saved", "by node", "more ranks", "fewer ranks"],
)
def test_restore_point_takes_the_ranks_it_is_told(
    nodes: list[Path], call: Any, words: tuple[str, ...], want: list[Any]
) -> None:
    assert sources(ask(call, nodes, *words)) == want


def test_restore_point_permuted_nodes_read_from_the_remote_tier(
    nodes: list[Path], call: Any
) -> None:
    remote, first, second = nodes
    document = ask(call, [remote, second, first], "--ranks", "4")
    assert document["chosen"]["step"] == 10
    assert sources(document) == [("remote", [0, 1, 2, 3])]


def test_restore_point_with_one_folder_twice_counts_its_ranks_once(
    nodes: list[Path], call: Any
) -> None:
    remote, first, _ = nodes
    document = ask(call, [remote, first, first])
    assert (document["ranks"], document["nodes"]) == (4, [[0, 1], [], [2, 3]])


def test_restore_point_of_a_named_step_is_that_one(nodes: list[Path], call: Any) -> None:
    assert ask(call, nodes, "--step", "10")["chosen"]["step"] == 10


@pytest.mark.parametrize("words", [(), ("--json",)], ids=["text", "json"])
def test_restore_point_of_a_step_that_is_not_there_says_what_is(
    nodes: list[Path], call: Any, words: tuple[str, ...]
) -> None:
    answer = call("restore-point", "--remote", nodes[0], "--local", nodes[1], "--step", 11, *words)
    want = "step 11 is not in these folders; there are steps 30, 20, 10\n"
    assert (answer.code, answer.out, answer.err) == (1, "", want)


def test_restore_point_names_the_attempts_of_a_step_that_has_two(
    a_run: Any, a_step: Any, an_attempt: Any, call: Any
) -> None:
    remote = a_run()
    a_step(remote, 9)
    for nonce in (1, 2, 3):
        a_step(remote, 10, attempt=an_attempt(10, nonce))
    out = call("restore-point", "--remote", remote).out
    assert "\nstep 10 (attempt 0000000000000003) of lineage 1, " in out
    want = "step 10 (attempt 0000000000000002), 10 (attempt 0000000000000001), 9\n"
    assert f"if that fails: {want}" in out


def test_restore_point_speaks_of_one_rank_as_one(a_run: Any, a_step: Any, call: Any) -> None:
    remote, near = a_run(), a_run("node0")
    a_step(remote, 10, ranks=(0, 1), world_size=2)
    a_step(near, 20, ranks=(0,), world_size=2, tier="local")
    out = call("restore-point", "--remote", remote, "--local", near).out
    assert "  rank 1 has no whole local copy and it is not durable\n" in out


def test_restore_point_delivered_step_is_committed_first(
    a_run: Any, a_step: Any, call: Any
) -> None:
    remote = a_run()
    a_step(remote, 10)
    a_step(remote, 20, tier="open")
    document = ask(call, [remote])
    assert (document["chosen"]["step"], document["chosen"]["committed_first"]) == (20, True)
    assert not (next(remote.glob("step-*20.*")) / "COMMIT").exists(), "it never writes"


def test_restore_point_waits_for_what_all_announced(a_run: Any, a_step: Any, call: Any) -> None:
    remote = a_run()
    a_step(remote, 10, ranks=(0, 1), world_size=2)
    a_step(remote, 20, ranks=(0,), coming=(1,), world_size=2, tier="open")
    document = ask(call, [remote])
    assert (document["chosen"]["step"], document["pending"]["step"]) == (10, 20)


def test_restore_point_leaves_out_what_failed_three_times(
    a_run: Any, a_step: Any, an_attempt: Any, call: Any, now: Any
) -> None:
    remote = a_run()
    for step in (200, 300):
        a_step(remote, step)
    with Folder.open(remote) as folder:
        for number in (2, 3, 4):
            claim = LineageClaim(
                run_id=RUN_ID, number=number, restored=an_attempt(300), claimed_at=now
            )
            assert claim_lineage(folder, claim)
    document = ask(call, [remote])
    assert document["chosen"]["step"] == 200, "C122"
    assert "3 times in a row" in document["refused"][0]["why"]
    assert ask(call, [remote], "--step", "300")["chosen"]["step"] == 300


def test_restore_point_counts_a_claim_and_its_mirror_as_one_try(
    a_run: Any, a_step: Any, an_attempt: Any, call: Any, now: Any
) -> None:
    remote, near = a_run(), a_run("node0")
    for step in (200, 300):
        a_step(remote, step)
    for path in (remote, near):
        with Folder.open(path) as folder:
            for number in (2, 3):
                claim = LineageClaim(
                    run_id=RUN_ID, number=number, restored=an_attempt(300), claimed_at=now
                )
                assert claim_lineage(folder, claim)
    assert ask(call, [remote, near], "--ranks", "1")["chosen"]["step"] == 300


@pytest.mark.parametrize("has_mirror", [True, False])
def test_restore_point_after_a_rollback_whose_claim_is_damaged(
    a_run: Any, a_step: Any, an_attempt: Any, call: Any, now: Any, has_mirror: bool
) -> None:
    remote, near = a_run(), a_run("node0")
    for step in (200, 300):
        a_step(remote, step)
    claim = LineageClaim(
        run_id=RUN_ID, number=2, restored=an_attempt(200), explicit=True, claimed_at=now
    )
    for path in [remote, near][: 1 + has_mirror]:
        with Folder.open(path) as folder:
            assert claim_lineage(folder, claim)
    (remote / "lineages" / "2.json").write_text("")
    document = ask(call, [remote, near], "--ranks", "1")
    assert document["chosen"]["step"] == (200 if has_mirror else 300)
    told = [problem for problem in document["problems"] if "lineages/2.json is damaged" in problem]
    assert bool(told) is not has_mirror


def test_restore_point_damaged_newer_step_names_its_file(
    a_run: Any, a_step: Any, call: Any
) -> None:
    remote = a_run()
    a_step(remote, 10)
    (a_step(remote, 20) / "weights-0.distcp").unlink()
    document = ask(call, [remote])
    assert document["chosen"]["step"] == 10
    assert "weights-0.distcp: missing (10000 bytes)" in document["refused"][0]["why"]


def test_restore_point_with_nothing_saved_says_so(a_run: Any, call: Any) -> None:
    answer = call("restore-point", "--remote", a_run())
    assert (answer.code, answer.err) == (1, "run team-a/llama: nothing is saved in these folders\n")


def test_restore_point_nothing_restorable_is_not_well(a_run: Any, a_step: Any, call: Any) -> None:
    remote = a_run()
    a_step(remote, 10, ranks=(0,), coming=(1,), world_size=2, tier="open")
    answer = call("restore-point", "--remote", remote)
    assert answer.code == 1
    assert "nothing can be restored\n" in answer.out
    assert "  ranks [0, 1] have no whole local copy and it is not durable\n" in answer.out


def test_restore_point_without_remote_tier_says_what_a_job_does(
    nodes: list[Path], call: Any
) -> None:
    remote, *local = nodes
    document = ask(call, [remote.parent / "none", *local])
    assert document["chosen"]["step"] == 20
    assert document["problems"][0].endswith("none: No such file or directory")
    text = call("restore-point", "--remote", remote.parent / "none", "--local", local[0]).out
    assert "a job refuses to start without its remote tier" in text


def test_restore_point_of_two_runs_is_refused(a_run: Any, a_step: Any, call: Any) -> None:
    remote, other = a_run(), a_run("other", run_id=OTHER_RUN_ID, run="team-b/bert")
    a_step(remote, 1)
    answer = call("restore-point", "--remote", remote, "--local", other)
    assert answer.code == 1
    assert "is of run team-b/bert" in answer.err


@pytest.mark.parametrize(
    "words",
    [
        lambda run: ("--remote", run, "--ranks", "0"),
        lambda run: ("--remote", run, "--ranks", "2", "--ranks-per-node", "2"),
        lambda run: ("--remote", run, "--ranks-per-node", "2"),
        lambda run: ("--ranks", "2"),
    ],
    ids=["no ranks", "both", "ranks of no node", "no folder"],
)
def test_restore_point_wrong_words_are_usage(
    a_run: Any, call: Any, words: Callable[[Path], tuple[object, ...]]
) -> None:
    assert call("restore-point", *words(a_run())).code == 2


def test_restore_point_text_is_what_a_person_needs(nodes: list[Path], call: Any) -> None:
    remote, first, _ = nodes
    answer = call("restore-point", "--remote", remote, "--local", first)
    want = [
        "team-a/llama restored by 4 ranks",
        "step 10 of lineage 1, 40M tokens, saved by 4 ranks",
        f"  ranks 0-1 from local {first}",
        f"  ranks 2-3 from remote {remote}",
        "  in step-00000000000000000010.000000000000000a",
        "not step-00000000000000000030.000000000000001e",
        "  ranks [2, 3] have no whole local copy and it is not durable",
        "not step-00000000000000000020.0000000000000014",
        "  ranks [2, 3] have no whole local copy and it is not durable",
    ]
    assert answer.out.splitlines() == want
