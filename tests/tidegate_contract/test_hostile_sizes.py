"""What the largest documents cost, hostile and honest: each in its own process, with a limit."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

MEMORY_BYTES = 1 << 30

MEASURE = """
import json, resource, sys, time
from tidegate_contract.digest import digest_of_blocks, sha256_hex
from tidegate_contract.document import MAX_BYTES, MAX_KEYS, MAX_TEXT, MAX_VALUES, decode
from tidegate_contract.errors import Corrupt, Reject
from tidegate_contract.seal import Manifest

def head(files):
    return (b'{{"attempt":{{"nonce":"00000000000000aa","step":1}},"files":[' + files
        + b'],"kind":"manifest","lineage":1,"reason":"Cadence","run_id":"r"')

TAIL = (b',"sealed_at":"2026-11-29T12:00:00.000000Z","tokens":1,"torch_version":"2.15.0",'
    b'"version":1,"world_size":1}}')

def signed(files):
    start = head(files)
    return start + b',"sha256":"' + sha256_hex(start, TAIL).encode() + b'"' + TAIL

def an_entry(number):
    block = "%032x" % number
    return ('{{"block_size":16777216,"blocks":["%s"],"digest":"%s","name":"weights-%d.distcp",'
        '"scope":"Both","size":21}}' % (block, digest_of_blocks([block]), number)).encode()

def entries(count):
    return b",".join(an_entry(number) for number in range(count))

def one_entry(blocks):
    return (b'{{"block_size":16777216,"blocks":[' + b",".join(blocks) + b'],"digest":"'
        + digest_of_blocks(b.decode().strip('"') for b in blocks).encode()
        + b'","name":"a","scope":"Both","size":%d}}' % (len(blocks) << 24))

def fill(piece, count=None):
    room = (MAX_BYTES - 1000) // (len(piece) + 1)
    return ((piece + b",") * min(room, count or room))[:-1]

data = signed({files})
resource.setrlimit(resource.RLIMIT_AS, ({memory}, {memory}))  # the document's own bytes count
open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far
started = time.process_time()
try:
    decode(Manifest, data, "manifest.json")
    sentence = ""
except (Corrupt, Reject) as error:
    sentence = str(error)
status = open("/proc/self/status").read()
print(json.dumps({{
    "bytes": len(data),
    "seconds": round(time.process_time() - started, 1),
    "peak_mib": int(status.split("VmHWM:")[1].split()[0]) >> 10,
    "sentence": sentence,
}}))
"""


def measure(files: str) -> dict[str, Any]:
    """Decodes a manifest whose files are this expression; what it took and said."""
    program = MEASURE.format(memory=MEMORY_BYTES, files=files)
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        pytest.param("fill(an_entry(1), 600_000)", "values, allowed are", id="too many files"),
        pytest.param("fill(b'[]')", "values, allowed are", id="empty lists"),
        pytest.param("fill(b'0')", "values, allowed are", id="zeros"),
        pytest.param("fill(b'{}')", "values, allowed are", id="empty objects"),
        pytest.param("b' ' * MAX_BYTES", "bytes, allowed are", id="too many bytes"),
        pytest.param("b'\"' + b'x' * (MAX_BYTES - 1000) + b'\"'", "an object", id="one text"),
        pytest.param("b'[' * (MAX_VALUES - 100)", "not a JSON document", id="deep"),
        pytest.param("b'9' * (MAX_BYTES - 1000)", "not a JSON document", id="one number"),
    ],
)
@pytest.mark.long
@pytest.mark.timeout(120)
def test_document_of_hostile_size_is_refused_cheaply(files: str, sentence: str) -> None:
    found = measure(files)
    assert found["sentence"].startswith("manifest.json: ")
    assert sentence in found["sentence"]
    assert found["seconds"] < 5


WORST = {
    "small objects": "fill(b'{\"a\":0}', MAX_VALUES // 2 - 100)",
    "objects of many keys": (
        "fill(b'{' + b','.join(b'\"%d\":0' % n for n in range(MAX_KEYS)) + b'}',"
        " MAX_VALUES // (MAX_KEYS + 1) - 100)"
    ),
    "lists of one": "fill(b'[0]', MAX_VALUES // 2 - 100)",
    "long numbers": "fill(b'1' * 30, MAX_VALUES - 100)",
    "short texts": "fill(b'\"abcdefghijklmnopqrstuvwxyz\"', MAX_VALUES - 100)",
    "wide texts": "fill(b'\"' + b'\\\\ud83d\\\\ude00' * 1300 + b'\"')",
    "an object with too many keys": (
        "b'{' + b','.join(b'\"%d\":0' % n for n in range(MAX_VALUES - 100)) + b'}'"
    ),
    "half a million honest files": "entries(520_000)",
    "sixty honest tebibytes": "one_entry([b'\"%032x\"' % n for n in range(MAX_VALUES - 100)])",
}


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_largest_documents(write_result: Callable[[dict[str, Any]], None]) -> None:
    results = {name: measure(files) for name, files in WORST.items()}
    for name, found in results.items():
        is_honest = "honest" in name
        assert (found["sentence"] == "") == is_honest, (name, found)
    write_result({"memory_limit_mib": MEMORY_BYTES >> 20, "documents": results})
