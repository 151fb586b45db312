"""Requests of Firecracker's API and its command lines. Pure."""

import json
from pathlib import Path
from typing import Any

import pytest

from aenv.vmm.firecracker import requests
from aenv.vmm.firecracker.binary import FirecrackerBinary, parse_version
from aenv.vmm.firecracker.options import FirecrackerOptions, RateLimit
from aenv.vmm.firecracker.probe import probe, probe_configuration, wrong_kernel
from aenv.vmm.firecracker.vmm import command, fingerprint
from aenv.vmm.protocol import Accelerator, MachineShape, NetworkAttachment

SHAPE = MachineShape(2, 768)
NETWORK = NetworkAttachment("aenvfc-3", "tap0", "02:00:00:00:00:03")
PLAIN = FirecrackerOptions()


def bodies(options: FirecrackerOptions = PLAIN) -> dict[str, dict[str, Any]]:
    made = requests.boot("console=ttyS0", SHAPE, NETWORK, options)
    return {request.path: dict(request.body or {}) for request in made}


def test_a_boot_has_every_device_and_starts_last() -> None:
    made = requests.boot("console=ttyS0", SHAPE, NETWORK, PLAIN)
    assert {request.method for request in made} == {"PUT"}
    assert [request.path for request in made] == [
        "/machine-config", "/boot-source", "/entropy", "/drives/root", "/network-interfaces/eth0", "/balloon",
        "/actions",
    ]  # fmt: skip
    assert made[-1].body == {"action_type": "InstanceStart"}
    found = bodies()
    assert found["/machine-config"] == {
        "vcpu_count": 2, "mem_size_mib": 768, "smt": False, "track_dirty_pages": False,
    }  # fmt: skip
    assert found["/boot-source"]["boot_args"] == "console=ttyS0"
    assert found["/network-interfaces/eth0"]["host_dev_name"] == "tap0"
    assert found["/network-interfaces/eth0"]["guest_mac"] == "02:00:00:00:00:03"
    assert found["/balloon"] == {"amount_mib": 0, "deflate_on_oom": True, "free_page_reporting": True}


def test_the_initramfs_mounts_the_root_disk_and_not_firecracker() -> None:
    drive = bodies()["/drives/root"]
    assert drive["is_root_device"] is False
    assert drive["is_read_only"] is False


def test_files_are_named_relative_to_the_cell() -> None:
    """A snapshot remembers the disk's name: it must be the same in every VM's own directory."""
    source = bodies()["/boot-source"]
    load = requests.load(NETWORK).body
    assert load is not None
    paths = [
        source["kernel_image_path"], source["initrd_path"], bodies()["/drives/root"]["path_on_host"],
        load["snapshot_path"], load["mem_backend"]["backend_path"],
    ]  # fmt: skip
    assert all(path and not path.startswith("/") for path in paths)
    assert len(set(paths)) == len(paths)
    assert requests.DISK.startswith("dev/"), "it may be a block device, which a jail has below /dev only"


def test_a_snapshot_is_loaded_without_running_into_another_slots_tap() -> None:
    load = requests.load(NETWORK)
    assert (load.method, load.path) == ("PUT", "/snapshot/load")
    assert load.body is not None
    assert load.body["resume_vm"] is False
    assert load.body["mem_backend"]["backend_type"] == "File"
    assert load.body["network_overrides"] == [{"iface_id": "eth0", "host_dev_name": "tap0"}]


def test_state_is_saved_without_memory() -> None:
    body = requests.save_state().body
    assert body is not None
    assert body["snapshot_path"] == requests.SAVE
    assert body["mem_file_path"].startswith("nowhere/")


def test_limits_are_buckets_of_a_second() -> None:
    options = FirecrackerOptions(
        disk=RateLimit(bandwidth=1 << 20, operations=500),
        download=RateLimit(bandwidth=5),
        upload=RateLimit(operations=7),
    )
    made = bodies(options)
    assert made["/drives/root"]["rate_limiter"] == {
        "bandwidth": {"size": 1 << 20, "refill_time": 1000}, "ops": {"size": 500, "refill_time": 1000},
    }  # fmt: skip
    card = made["/network-interfaces/eth0"]
    assert card["rx_rate_limiter"]["bandwidth"] == {"size": 5, "refill_time": 1000}
    assert card["tx_rate_limiter"]["ops"] == {"size": 7, "refill_time": 1000}


def test_a_restored_vm_gets_the_nodes_limits_and_loses_others() -> None:
    """A bucket of size 0 takes a limit away that the snapshot brought."""
    drive, card = requests.limits(PLAIN)
    assert (drive.method, card.method) == ("PATCH", "PATCH")
    none = {"size": 0, "refill_time": 0}
    assert drive.body == {"drive_id": "root", "rate_limiter": {"bandwidth": none, "ops": none}}
    assert card.body is not None
    assert card.body["rx_rate_limiter"] == card.body["tx_rate_limiter"] == {"bandwidth": none, "ops": none}


@pytest.mark.parametrize(("machine", "has", "lacks"), [
    ("x86_64", ["console=ttyS0", "reboot=k", "i8042.noaux"], ["keep_bootcon"]),
    ("aarch64", ["console=ttyS0", "reboot=k", "keep_bootcon"], ["i8042.noaux"]),
])  # fmt: skip
def test_the_command_line_of_each_architecture(machine: str, has: list[str], lacks: list[str]) -> None:
    words = requests.kernel_parameters({"aenv.ip": "10.0.0.1/30", "ro": ""}, PLAIN, machine).split()
    assert set(has) <= set(words)
    assert not set(lacks) & set(words)
    assert words[-2:] == ["aenv.ip=10.0.0.1/30", "ro"]
    assert "nomodule" not in words, "the guest's drivers are modules"


def test_a_guest_reports_freed_pages_in_place_of_clearing_them() -> None:
    """Its driver reports none as long as it clears them itself (``virtballoon_validate``)."""
    parameters = {"init_on_free": "1", "init_on_alloc": "0"}
    assert "init_on_free" not in requests.kernel_parameters(parameters, PLAIN)
    assert "init_on_alloc=0" in requests.kernel_parameters(parameters, PLAIN)
    assert "init_on_free=1" in requests.kernel_parameters(parameters, FirecrackerOptions(page_reporting=False))


@pytest.mark.parametrize("parameters", [
    {"a": "b c"}, {"a": "b\nc"}, {"a b": ""}, {"": "x"}, {"a": 'b"c'}, {"a": "ü"}, {"a": "x" * 2000},
])  # fmt: skip
def test_parameters_that_would_not_arrive_are_refused(parameters: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"parameter|command line"):
        requests.kernel_parameters(parameters, PLAIN)


def test_every_request_is_json() -> None:
    for request in [*requests.boot("x", SHAPE, NETWORK, PLAIN), *requests.limits(PLAIN), requests.reopen_drive()]:
        assert json.loads(json.dumps(request.body)) == request.body


@pytest.mark.parametrize(("output", "version"), [
    ("Firecracker v1.16.1\n\n2026-01-01T00:00:00 [x:main] exiting\n", (1, 16, 1)),
    ("v10.0.0\n", (10, 0, 0)),
    ("Firecracker v1.17.0-dev\n", (1, 17, 0)),
    ("QEMU emulator version 10.0.2\n", None),
    ("", None),
])  # fmt: skip
def test_versions(output: str, version: tuple[int, int, int] | None) -> None:
    assert parse_version(output) == version


def test_the_command_leaves_seccomp_on() -> None:
    binary = FirecrackerBinary("/bin/fc", "1.16.1", "10.0.0", "x")
    argv = command(binary, "abc", "/run/netns/fc.sock", "/run/netns/fc.log")
    assert argv[:5] == ["/bin/fc", "--id", "aenv-abc", "--api-sock", "/run/netns/fc.sock"]
    assert not any("seccomp" in word for word in argv)


def test_snapshots_of_other_releases_formats_and_accelerators_do_not_match() -> None:
    new, old = FirecrackerBinary("f", "1.16.1", "10.0.0", "x"), FirecrackerBinary("f", "1.15.1", "9.0.0", "y")
    here = fingerprint(new, Accelerator.KVM, "k")
    assert here.vmm == "firecracker"
    assert not here.mismatches(fingerprint(new, Accelerator.KVM, "k"))
    assert {text.split(" is ")[0] for text in here.mismatches(fingerprint(old, Accelerator.KVM, "k"))} == {
        "vmm version", "machine",
    }  # fmt: skip
    assert [text.split(" is ")[0] for text in here.mismatches(fingerprint(new, Accelerator.PVM, "k"))] == [
        "accelerator"
    ]


def test_the_probes_vm_has_no_disk_and_talks() -> None:
    made = probe_configuration(Path("/k"), Path("/i"))
    assert made["drives"] == []
    source = made["boot-source"]
    assert isinstance(source, dict)
    assert (source["kernel_image_path"], source["initrd_path"]) == ("/k", "/i")
    assert "earlyprintk=ttyS0" in source["boot_args"] and "quiet" not in source["boot_args"]


IMAGE = bytes(56) + b"ARM\x64" + bytes(4)


@pytest.mark.parametrize(("head", "machine", "right"), [
    (b"\x7fELF\x02", "x86_64", True), (b"MZ\xea\x07", "x86_64", False), (IMAGE, "x86_64", False),
    (b"", "x86_64", False),
    (IMAGE, "aarch64", True), (b"\x7fELF" + bytes(60), "aarch64", False), (b"\x1f\x8b" + bytes(62), "aarch64", False),
])  # fmt: skip
def test_each_architecture_has_its_kernel_format(head: bytes, machine: str, right: bool) -> None:
    assert (wrong_kernel(head, machine) is None) is right


async def test_a_kernel_of_another_format_is_not_booted(tmp_path: Path) -> None:
    (kernel := tmp_path / "kernel").write_bytes(b"MZ" + bytes(100))
    binary = FirecrackerBinary("/nonexistent", "1.16.1", "10.0.0", "x")
    verdict = await probe(binary, Accelerator.KVM, kernel, kernel)
    assert not verdict.works and "kernel" in verdict.reason and "AENV_KERNEL" in verdict.advice
