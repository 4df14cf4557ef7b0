"""Freed memory stays with the process while a training runs, and is given back after it."""

import os
import platform
import subprocess
import sys

import pytest

# Twenty blocks above 32 MiB, each touched and freed: how many pages the kernel had to bring.
FAULTS = """
import resource, torch
from ctxext.system.allocator import freed_memory_kept
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(12 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
def resident():
    return int(open("/proc/self/statm").read().split()[1])
usual = faults()
with freed_memory_kept() as is_kept:
    faults()
    kept, held = faults(), resident()
print(is_kept, usual, kept, faults(), held - resident())
"""


def measured(**environment):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC")} | environment
    result = subprocess.run([sys.executable, "-c", FAULTS], env=environment, capture_output=True, text=True, check=True)
    is_kept, *counts = result.stdout.split()
    return is_kept == "True", *map(int, counts)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_blocks_are_used_again_and_given_back_at_the_end():
    is_kept, usual, kept, after, given_back = measured()
    assert is_kept
    assert kept < usual / 10
    assert after > usual / 2
    assert given_back > 10_000


def test_what_the_environment_says_of_the_allocator_stays():
    is_kept, usual, kept, _, _ = measured(MALLOC_ARENA_MAX="4")
    assert not is_kept
    assert kept > usual / 2


def test_nothing_where_there_is_no_glibc(monkeypatch):
    from ctxext.system.allocator import freed_memory_kept

    monkeypatch.setattr(sys, "platform", "darwin")
    with freed_memory_kept() as is_kept:
        assert not is_kept
