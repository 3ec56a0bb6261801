"""The judge over HTTP, against a real server on loopback that behaves as real ones do: well, badly, or not at all."""

from __future__ import annotations

import asyncio
import gzip
import os
import resource
import time
from collections.abc import Callable
from functools import partial
from math import nan
from pathlib import Path
from typing import Any

import pytest

from tests.contract.recipes import make
from tests.unit.rewards.support import Reply, Server, answers_in, longer, score
from trlx_like.config import RewardFnConfig
from trlx_like.errors import ConfigError, DiskError, RewardError
from trlx_like.rewards import transport
from trlx_like.rewards.judges import GroupReward, make_judge
from trlx_like.rewards.judging import judged
from trlx_like.rewards.llm_judge import LLMJudge
from trlx_like.rewards.runner import RewardRunner, Scores
from trlx_like.rewards.transport import MAX_BYTES


def judge_of(server: Server, **options: Any) -> LLMJudge:
    return LLMJudge(server.url, "judge", **{"backoff": 0.01, "retries": 2, **options})


PAIRS = [("aaa", "b"), ("a", "bbb"), ("{a} or {b}", "x")]
PROMPTS = ["p", "{b}", "r"]


def test_pairs_are_asked_about_in_both_orders(server: Server) -> None:
    """Fields in the texts themselves stay as they are; an answer may have letters of markup around it."""
    judge = judge_of(server, body={"max_tokens": 5})
    assert judge.compare(prompts=PROMPTS, pairs=PAIRS) == [0, 1, 0]
    assert len(server.requests) == judge.counts["asked"] == 6
    assert {answers_in(r["messages"][0]["content"]) for r in server.requests} == {*PAIRS, *(p[::-1] for p in PAIRS)}
    assert all("Prompt:\n{b}\n" in r["messages"][0]["content"] for r in server.requests if "bbb" in str(r))
    expected = {"path": "/v1/chat/completions", "model": "judge", "temperature": 0, "max_tokens": 5}
    assert all({**r, "messages": None} == {**expected, "messages": None} for r in server.requests)
    server.reply = lambda text: f"Both are good.\n**{longer(text)}**."
    assert judge_of(server).compare(prompts=PROMPTS, pairs=PAIRS) == [0, 1, 0]


def test_a_preference_for_a_place_is_no_preference(server: Server) -> None:
    server.reply = lambda text: "A"
    judge = judge_of(server)
    assert judge.compare(prompts=PROMPTS, pairs=PAIRS) == [None] * 3
    assert judge.counts["order_dependent"] == 3
    assert judge_of(server, swap=False).compare(prompts=PROMPTS, pairs=PAIRS) == [0] * 3


@pytest.mark.parametrize("answer", ["Neither.", "", "A or B", "C", "A better answer is B", "Answer: A"])
def test_what_is_neither_a_nor_b_abstains_and_is_counted(server: Server, answer: str) -> None:
    server.reply = lambda text: answer if "aaa" in text else longer(text)
    judge = judge_of(server)
    assert judge.compare(prompts=PROMPTS, pairs=PAIRS) == [None, 1, 0]
    assert judge.counts["unparsed"] == 2
    assert judged(judge, ["p"], [["aaa", "b"]]) == [[0.5, 0.5]]  # a tie, which Online DPO skips


def test_a_failure_that_passes_is_retried_with_longer_waits(server: Server) -> None:
    times: list[float] = []

    def busy(text: str) -> str | Reply:
        times.append(time.monotonic())
        return longer(text) if len(times) > 2 else (503, "busy", {})

    server.reply = busy
    judge = judge_of(server, swap=False, backoff=0.05)
    assert judge.compare(prompts=["p"], pairs=[("aaa", "b")]) == [0]
    assert judge.counts["retried"] == 2
    assert times[1] - times[0] >= 0.05 and times[2] - times[1] >= 0.1


def test_a_server_may_say_how_long_to_wait(server: Server) -> None:
    times: list[float] = []

    def limited(text: str) -> str | Reply:
        times.append(time.monotonic())
        return longer(text) if len(times) > 1 else (429, "slow down", {"Retry-After": "1"})

    server.reply = limited
    assert judge_of(server, swap=False).compare(prompts=["p"], pairs=[("aaa", "b")]) == [0]
    assert times[1] - times[0] >= 1


@pytest.mark.parametrize("asked", ["100000", "9" * 400, "\u00b2", "-1", "Wed, 21 Oct 2099 07:28:00 GMT"])
def test_a_server_cannot_make_a_run_wait_for_long(server: Server, monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    """At the bound the waits still differ, so that requests do not all come again at once."""
    waits: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        await real(0)

    monkeypatch.setattr(transport, "_pause", sleep)
    server.reply = lambda text: (429, "later", {"Retry-After": asked})
    with pytest.raises(RewardError, match="failed 9 times; the last time status 429"):
        judge_of(server, swap=False, retries=8, backoff=1).compare(prompts=["p"], pairs=[("aaa", "b")])
    assert len(waits) == len(set(waits)) == 8
    bounds = [60] * 8 if asked.isdecimal() else [min(2**n, 60) for n in range(8)]
    assert all(bound <= wait <= 1.5 * bound for wait, bound in zip(waits, bounds, strict=True))


def test_a_failure_that_stays_is_an_error(server: Server) -> None:
    server.reply = lambda text: (503, "busy", {})
    with pytest.raises(
        RewardError, match=r"judge.url \(http://127.*\) failed 3 times; the last time status 503: .*busy"
    ):
        judge_of(server).compare(prompts=["p"], pairs=[("a", "b")])
    assert 3 <= len(server.requests) <= 6


def test_a_silent_server_is_given_up(server: Server) -> None:
    def silent(text: str) -> str:
        time.sleep(0.5)
        return "A"

    server.reply = silent
    started = time.monotonic()
    with pytest.raises(RewardError, match=r"failed 2 times; .* had not answered within judge.timeout \(0.05 s\)"):
        judge_of(server, timeout=0.05, retries=1).compare(prompts=["p"], pairs=[("a", "b")])
    assert time.monotonic() - started < 0.5


def test_a_server_that_answers_byte_by_byte_is_given_up(server: Server) -> None:
    """Never silent for long, and yet not done in time."""
    server.pause, server.part = 0.05, 1
    started = time.monotonic()
    with pytest.raises(RewardError, match=r"failed 1 times; .* had not answered within judge.timeout \(0.3 s\)"):
        judge_of(server, timeout=0.3, retries=0).compare(prompts=["p"], pairs=[("a", "b")])
    assert time.monotonic() - started < 2


def test_an_answer_of_three_gigabytes_is_not_read(server: Server) -> None:
    """The server notices that nobody reads on."""
    before, sent = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []

    class Endless(bytes):
        def __len__(self) -> int:
            return 3 * 2**30

        def __getitem__(self, place: Any) -> Any:
            sent.append(1)
            return b"A" * 65536

    server.reply, server.part = lambda text: (200, Endless(), {}), 65536
    with pytest.raises(RewardError, match=r"judge.url \(http://127.*\) answered with more than 1048576 bytes\."):
        judge_of(server, swap=False).compare(prompts=["p"], pairs=[("a", "b")])
    assert len(sent) * 65536 < 2**28
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # KiB


def test_an_answer_is_not_unpacked(server: Server) -> None:
    """A hundred kilobytes could be a hundred megabytes here; the server is asked to send none such."""
    server.reply = lambda text: (200, gzip.compress(b"A" * 10**8), {"Content-Encoding": "gzip"})
    with pytest.raises(RewardError, match=r"answered with no chat completion: b'\\x1f"):
        judge_of(server, swap=False).compare(prompts=["p"], pairs=[("a", "b")])
    assert server.headers[0]["Accept-Encoding"] == "identity"


def test_an_answer_without_end_is_refused(server: Server) -> None:
    server.reply = lambda text: "A" * (MAX_BYTES + 1)
    with pytest.raises(RewardError, match=r"judge.url \(http://127.*\) answered with more than 1048576 bytes\."):
        judge_of(server).compare(prompts=["p"], pairs=[("a", "b")])


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_the_key_does_not_follow_a_redirect(server: Server, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    other = Server()
    monkeypatch.setenv("OPENAI_API_KEY", "not-a-real-key")
    server.reply = lambda text: (status, "", {"Location": f"{other.url}/chat/completions"})
    with pytest.raises(RewardError, match=rf"refuses: status {status} redirects to {other.url}/chat/completions"):
        judge_of(server, swap=False).compare(prompts=["p"], pairs=[("a", "b")])
    assert len(server.requests) == 1 and not other.headers
    other.http.shutdown()
    other.http.server_close()


def test_a_judge_may_be_asked_where_an_event_loop_is_running(server: Server) -> None:
    """As in a notebook. What it raises arrives there too."""

    async def cell() -> list[int | None]:
        return judge_of(server).compare(prompts=PROMPTS, pairs=PAIRS)

    assert asyncio.run(cell()) == [0, 1, 0]
    server.reply = lambda text: (401, "no key", {})
    with pytest.raises(RewardError, match="refuses: status 401"):
        asyncio.run(cell())


def test_a_server_that_is_not_there(server: Server) -> None:
    server.http.server_close()
    with pytest.raises(RewardError, match=r"failed 3 times; the last time ConnectError: "):
        judge_of(server).compare(prompts=["p"], pairs=[("a", "b")])


def test_a_refusal_is_not_retried(server: Server) -> None:
    server.reply = lambda text: (401, b'{"error": "no key"}', {})
    with pytest.raises(RewardError, match=r'refuses: status 401: \{"error": "no key"\}'):
        judge_of(server, swap=False).compare(prompts=["p"], pairs=[("a", "b")])
    assert len(server.requests) == 1


@pytest.mark.parametrize("body", [b"<html>", b"{}", b'{"choices": []}', b'{"choices": [null]}', b"3", b"[" * 100_000])
def test_what_is_no_chat_completion(server: Server, body: bytes) -> None:
    server.reply = lambda text: (200, body, {})
    with pytest.raises(RewardError, match="answered with no chat completion: b'"):
        judge_of(server).compare(prompts=["p"], pairs=[("a", "b")])


def test_answers_are_asked_for_once(server: Server, tmp_path: Path) -> None:
    """Within a batch, within a run, and over runs by the file, whose last line a killed run left half-written."""
    file = tmp_path / "cache.jsonl"
    judge = judge_of(server, cache=file)
    assert judge.compare(prompts=["p", "p"], pairs=[("aaa", "b"), ("b", "aaa")]) == [0, 1]
    assert judge.compare(prompts=["p"], pairs=[("aaa", "b")]) == [0]
    assert len(server.requests) == 2 and judge.counts["cached"] == 4
    with file.open("a") as lines:
        lines.write('{"question": "half')
    again = judge_of(server, cache=file)
    assert again.compare(prompts=["p"], pairs=[("aaa", "b")]) == [0]
    assert len(server.requests) == 2
    judge_of(server, cache=file, body={"temperature": 1}).compare(prompts=["p"], pairs=[("aaa", "b")])
    assert len(server.requests) == 4  # another question


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (os.mkfifo, "it is a pipe"),
        (os.mkdir, "Is a directory"),
        (partial(os.symlink, "/dev/zero"), "it is a device"),
        (lambda file: file.write_bytes(b"\xff"), "can't decode byte"),
        (lambda file: file.parent.rename(file.parent.with_name("b")).with_name("a").write_text(""), "is not a folder"),
    ],
)
def test_a_cache_that_cannot_be_used_is_refused(make: Callable[[Path], Any], says: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    make(tmp_path / "a" / "cache.jsonl")
    with pytest.raises(ConfigError, match=rf"judge.cache \(.*cache.jsonl'\) cannot be used: .*{says}"):
        LLMJudge("http://localhost", "m", cache=tmp_path / "a" / "cache.jsonl")


def test_the_cache_gets_its_folder_and_a_full_disk_is_named(server: Server, tmp_path: Path) -> None:
    judge = judge_of(server, cache=tmp_path / "new" / "cache.jsonl")
    assert not (tmp_path / "new").exists()
    judge.compare(prompts=["p"], pairs=[("aaa", "b")])
    (tmp_path / "new" / "cache.jsonl").unlink()
    (tmp_path / "new" / "cache.jsonl").symlink_to("/dev/full")
    with pytest.raises(DiskError, match="cache.jsonl cannot be written: No space left"):
        judge.compare(prompts=["q"], pairs=[("aaa", "b")])


def test_the_key_comes_from_the_environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    judge_of(server, swap=False).compare(prompts=["p"], pairs=[("a", "b")])
    monkeypatch.setenv("JUDGE_KEY", "not-a-real-key")
    judge_of(server, swap=False, api_key_env="JUDGE_KEY").compare(prompts=["p"], pairs=[("a", "b")])
    monkeypatch.setenv("JUDGE_KEY", "Basic bm90OnJlYWw=\n")
    judge_of(server, swap=False, api_key_env="JUDGE_KEY").compare(prompts=["p"], pairs=[("a", "b")])
    sent = [headers.get("Authorization") for headers in server.headers]
    assert sent == [None, "Bearer not-a-real-key", "Basic bm90OnJlYWw="]
    monkeypatch.setenv("JUDGE_KEY", "caf\u00e9")
    with pytest.raises(ConfigError, match=r"judge.api_key_env \(JUDGE_KEY\): its value has characters that no key has"):
        judge_of(server, api_key_env="JUDGE_KEY").compare(prompts=["p"], pairs=[("a", "b")])


@pytest.mark.parametrize("status", [200, 302, 401, 503])
def test_a_server_that_repeats_the_key_does_not_bring_it_into_a_message(
    server: Server, monkeypatch: pytest.MonkeyPatch, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "opensesame")
    server.reply = lambda text: (status, b"No opensesame here", {"Location": "http://other/?opensesame"})
    with pytest.raises(RewardError) as raised:
        judge_of(server, swap=False).compare(prompts=["p"], pairs=[("a", "b")])
    assert "opensesame" not in repr(raised.value.args) and "No <redacted> here" in str(raised.value)
    server.reply = lambda text: "opensesame?"
    assert judge_of(server).compare(prompts=["p"], pairs=[("a", "b")]) == [None]
    assert "as is '<redacted>?'" in caplog.text and "opensesame" not in caplog.text


def test_a_password_in_the_address_is_in_no_message(server: Server) -> None:
    server.reply = lambda text: (401, "no", {})
    with pytest.raises(RewardError, match=r"judge.url \(http://<redacted>@127[^ ]*\) refuses: status 401"):
        LLMJudge(server.url.replace("//", "//user:opensesame@"), "judge").compare(prompts=["p"], pairs=[("a", "b")])


@pytest.mark.parametrize(
    ("secret", "place"),
    [
        ({"url": "http://user:opensesame@localhost/v1"}, "url"),
        ({"url": "http://localhost/v1?api_key=opensesame"}, "url"),
        ({"body": {"api_key": "opensesame"}}, "body.api_key"),
        ({"body": {"extra_headers": {"X-Key": "opensesame"}}}, "body.extra_headers.X-Key"),
    ],
)
def test_a_secret_in_the_configuration_is_refused(tmp_path: Path, secret: dict[str, Any], place: str) -> None:
    judge = {"name": "llm", "url": "http://localhost/v1", "model": "m", **secret}
    with pytest.raises(ConfigError) as refused:
        make("OnlineDPOTrainer", tmp_path, reward_fn=None, **{"data.judge": judge})
    assert str(refused.value) == (
        f"data.judge.{place}: looks like a secret, which has no place in a file. Put it into an environment variable, "
        "and name the variable as data.judge.api_key_env."
    )


def test_bad_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"judge.url \('localhost:8000'\) must begin with http:// or https://"):
        LLMJudge("localhost:8000", "m")
    with pytest.raises(ConfigError, match=r"judge.url \('http:///v1'\) names no server"):
        LLMJudge("http:///v1", "m")
    with pytest.raises(ConfigError, match=r"judge.url \('http://h:x/v1'\) is no address: "):
        LLMJudge("http://h:x/v1", "m")
    for option, value in {"retries": -1, "backoff": nan, "workers": 0, "timeout": nan}.items():
        with pytest.raises(ConfigError, match=rf"judge.{option} \({value}\) must be "):
            LLMJudge("http://localhost", "m", **{option: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"judge.template lacks \{prompt\}, \{b\}"):
        LLMJudge("http://localhost", "m", template="{a}?")


def test_it_works_in_a_process_of_its_own(server: Server) -> None:
    """The server is in this one."""
    runner = RewardRunner(GroupReward(judge_of(server), 2), RewardFnConfig(workers=1))
    given = {"samples": ["x"] * 4, "prompts": ["p", "p", "q", "q"], "outputs": ["aaa", "b", "c", "dd"]}
    assert score(runner, given, [{}] * 4).rewards == [1.0, 0.0, 0.0, 1.0]
    runner.close()
    assert len(server.requests) == 4


def test_a_time_limit_ends_its_requests(server: Server) -> None:
    """At once: nobody waits until the server has answered."""

    def slow(text: str) -> str:
        time.sleep(5)
        return "A"

    server.reply = slow
    runner = RewardRunner(GroupReward(judge_of(server), 2), RewardFnConfig(time_limit=0.2, on_error="abstain"))
    started = time.monotonic()
    given = {"samples": ["x"] * 2, "prompts": ["p"] * 2, "outputs": ["aaa", "b"]}
    assert score(runner, given, [{}] * 2) == Scores([None, None], {}, 1)
    assert time.monotonic() - started < 4


def test_online_dpo_learns_from_it(server: Server, tmp_path: Path) -> None:
    """Named in the configuration; the pairs it makes have the longer response as the chosen one."""
    judge = {"name": "llm", "url": server.url, "model": "judge"}
    assert isinstance(make_judge(judge), LLMJudge)
    trainer = make("OnlineDPOTrainer", tmp_path, reward_fn=None, **{"data.judge": judge, "train.total_steps": 1})
    assert trainer.learn()["objective/scores_margin"] > 0
    for pair in trainer.store.elements:
        chosen, rejected = trainer.decode([pair.chosen, pair.rejected])
        assert len(chosen) >= len(rejected)
