"""Answers to save requests."""

from tidegate.answers import Answers
from tidegate_contract.layout import Attempt
from tidegate_contract.wire import AnswerResult, SaveAnswer

TEN = Attempt(step=10, nonce="000000000000000a")


class Told:
    """Takes what a reporter is told."""

    def __init__(self) -> None:
        self.answers: list[SaveAnswer] = []

    def update(self, *, answer: SaveAnswer) -> None:
        self.answers.append(answer)


def test_outcome_is_told_of_the_request_that_the_save_was_begun_for():
    told = Told()
    answers = Answers(told)
    answers.hear(1)
    assert answers.acknowledge(TEN) == 1
    answers.hear(2)

    answers.settle(1, TEN, is_sealed=True)

    assert told.answers[-1] == SaveAnswer(request_id=1, result=AnswerResult.SEALED, attempt=TEN)
    assert answers.open_request == 2


def test_failure_of_an_older_request_does_not_count_for_the_newer_one():
    told = Told()
    answers = Answers(told)
    answers.hear(1)
    answers.acknowledge(TEN)
    answers.hear(2)

    answers.settle(1, TEN, is_sealed=False)
    answers.acknowledge(TEN)

    first, second = told.answers[-2:]
    assert (first.request_id, first.result, first.failures) == (1, AnswerResult.FAILED, 1)
    assert (second.request_id, second.failures) == (2, 0)


def test_request_that_gets_no_slot_is_tried_once_more_and_left():
    told = Told()
    answers = Answers(told)
    answers.hear(1)

    answers.fail_open()
    assert answers.open_request == 1
    answers.fail_open()

    assert answers.open_request == 0
    assert [(a.request_id, a.failures) for a in told.answers] == [(1, 1), (1, 2)]
