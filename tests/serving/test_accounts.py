"""Tenants' accounts in shared memory: each process has a column, and a process that dies leaves one to clear."""

from __future__ import annotations

import subprocess
import sys

import pytest

from chairlift.serving.accounts import Accounts, SharedLoads
from chairlift.serving.admission import Admission, Refused, queue_names
from chairlift.serving.keys import Tenant

QUEUE = queue_names("queue")
BOTH = ["alice", "bob", *QUEUE]


def test_what_one_process_counts_another_sees_and_each_takes_back_its_own() -> None:
    first = Accounts.shared(BOTH, 2)
    second = Accounts.shared(BOTH, 2, 1, first.descriptor)
    first.add("bob", 3)
    second.add("bob", 2)
    assert (first.live("bob"), second.live("bob"), first.live("alice")) == (5, 5, 0)
    first.clear(1)
    assert second.live("bob") == 3


def test_the_tokens_of_a_tenant_are_paid_for_once_in_all_processes() -> None:
    first = Accounts.shared(BOTH, 2)
    second = Accounts.shared(BOTH, 2, 1, first.descriptor)
    for accounts in (first, second):
        accounts.charge("bob", 60, 60, now=1000.0)
    assert first.debt("bob", 1000.0) == second.debt("bob", 1000.0) == 60.0
    assert first.debt("alice", 1000.0) == 0.0


def test_a_tenant_s_last_place_is_given_by_one_process_only() -> None:
    bob = Tenant("bob", max_concurrent=3)
    first = Accounts.shared(BOTH, 2)
    second = Accounts.shared(BOTH, 2, 1, first.descriptor)
    admissions = [Admission(100, 1000, accounts=each) for each in (first, second)]
    admitted, refused = [], 0
    for number in range(8):
        try:
            admitted.append(admissions[number % 2].admit(bob, 1, 1, 0.0))
        except Refused as error:
            refused += error.refusal.reason == "tenant_limit"
    assert (len(admitted), refused) == (3, 5)
    for each in admitted:
        each.release(1.0)
    assert first.live("bob") == 0


RACER = """
import sys
from chairlift.serving.accounts import Accounts
from chairlift.serving.admission import Admission, Refused, queue_names
from chairlift.serving.keys import Tenant
accounts = Accounts.shared(["bob", *queue_names("queue")], 3, int(sys.argv[2]), int(sys.argv[1]))
admission, bob, most = Admission(100, 1000, accounts=accounts), Tenant("bob", max_concurrent=1), 0
for _ in range(20_000):
    try:
        admitted = admission.admit(bob, 1, 1, 0.0)
    except Refused:
        continue
    most = max(most, int(accounts._numbers[3]))  # the witness's column: another that holds the place has set it
    accounts._numbers[3] = 1.0
    accounts._numbers[3] = 0.0
    admitted.release(0.0)
print(most)
"""


def test_processes_that_race_for_one_place_never_both_have_it() -> None:
    # The third column is no process's: it counts for nothing while it is 0, and shows which tenant is in.
    accounts = Accounts.shared(["bob", *QUEUE], 3)
    assert accounts.descriptor is not None
    command = [sys.executable, "-c", RACER, str(accounts.descriptor)]
    racers = [
        subprocess.Popen([*command, str(number)], stdout=subprocess.PIPE, text=True, pass_fds=[accounts.descriptor])
        for number in range(2)
    ]
    assert [racer.communicate(timeout=120)[0].strip() for racer in racers] == ["0", "0"]
    assert accounts.live("bob") == 0


def test_every_process_knows_that_an_engine_is_busy_and_how_much_work_it_has() -> None:
    names = SharedLoads.names("0/0")
    first = SharedLoads(accounts := Accounts.shared(names, 2))
    second = SharedLoads(Accounts.shared(names, 2, 1, accounts.descriptor))
    first.set_busy("0/0", True)
    assert second.is_busy("0/0")
    first.add("0/0", 2, 100)
    second.add("0/0", 1, 50)
    assert (first.live("0/0"), second.live("0/0"), first.pending("0/0")) == (3, 3, 150)
    assert first.work("0/0") == second.work("0/0")
    accounts.clear(0)
    assert not second.is_busy("0/0") and second.live("0/0") == 1


def test_the_queue_s_bound_holds_for_all_processes_together() -> None:
    first = Accounts.shared(BOTH, 2)
    second = Accounts.shared(BOTH, 2, 1, first.descriptor)
    admissions = [Admission(3, 1000, accounts=each) for each in (first, second)]
    admitted = [admissions[place].admit(None, 1, 1, 0.0) for place in (0, 0, 0)]
    for admission in admissions:
        with pytest.raises(Refused, match="3 requests are waiting and the server's --max-waiting is 3"):
            admission.admit(None, 1, 1, 0.0)
    admitted[0].release(1.0)
    admissions[1].admit(None, 1, 1, 1.0)
