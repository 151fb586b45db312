"""The second prepared disk: nodes that have made their ``base`` template, on top of the system disk.

A template is device state and memory of this very machine, so it can only be made in the lab. A disk that was
prepared with older code is good: a node that starts makes again what does not fit any more.
"""

import shutil
import subprocess
from pathlib import Path

from aenv.guest.commands import GuestArtifactError, Progress
from lab import recipe
from lab.channel import Channel
from lab.disk import SystemDisk, locked, remove_replaced
from lab.homes import FIRECRACKER_BIN, VMMS, missing
from lab.machine import LabMachine, LabPanicError, remove_dead
from lab.settings import CHECKOUT, ENVD, FIRECRACKER, GUEST_CACHE, ROOT, LabSettings

ATTEMPTS = 3  # of what a panic of the lab's own kernel ends


def environment(settings: LabSettings) -> dict[str, str]:
    """Variables of programs in the lab."""
    columns = str(shutil.get_terminal_size((120, 40)).columns)
    found = {"AENV_LAB": "1", "PYTHONUNBUFFERED": "1", "LANG": "C.UTF-8", "COLUMNS": columns}
    found["AENV_TEST_ARTIFACTS"] = str(GUEST_CACHE / "artifacts")  # without a network no kernel can be fetched
    if settings.firecracker is not None:
        found[FIRECRACKER_BIN] = str(FIRECRACKER / settings.firecracker.name)
    return found


def sync(settings: LabSettings, channel: Channel) -> None:
    """Checkout and Firecracker, as they are now."""
    channel.sync()
    if settings.firecracker is not None:
        folder = settings.firecracker.parent
        jailer = [name for name in ("jailer",) if (folder / name).is_file()]
        channel.put_tree(folder, [settings.firecracker.name, *jailer], FIRECRACKER)


def home_key(settings: LabSettings, system: SystemDisk) -> str:
    parts: list[str | Path] = [system.key, ROOT / ENVD, Path(__file__).with_name("homes.py")]
    parts += sorted((ROOT / "src/aenv/vmm").glob("*.py"))
    if settings.firecracker is not None:
        parts.append(settings.firecracker)
    return recipe.digest(parts)


def existing_home(settings: LabSettings, system: SystemDisk) -> Path:
    """The disk with prepared nodes if there is one, else the system disk."""
    home = settings.cache / f"home-{home_key(settings, system)}.qcow2"
    return home if home.exists() else system.image


def ensure_home(settings: LabSettings, system: SystemDisk, progress: Progress) -> Path:
    """The disk with prepared nodes, made on the first call (some minutes).

    Where a node cannot be prepared, which is what a change under test may do, it is the system disk.
    """
    target = settings.cache / f"home-{home_key(settings, system)}.qcow2"
    with locked(settings.cache):
        remove_dead(settings)
        if target.exists():
            return target
        for _ in range(ATTEMPTS):
            machine = LabMachine(settings, "preparing")
            try:
                progress("preparing nodes: the lab boots, each makes its template")
                machine.start(system.image, system.kernel, background=False)
                if not _prepare(settings, machine, progress):
                    machine.check()
                    return system.image
                machine.shut_down()
                machine.check()
                machine.overlay.rename(target)
                break
            except (GuestArtifactError, OSError, subprocess.SubprocessError) as error:
                try:
                    machine.check()
                except LabPanicError as panic:
                    progress(str(panic))
                    continue
                progress(f"no node could be prepared: {error}")
                return system.image
            finally:
                machine.stop()
        else:
            return system.image
        remove_replaced(settings, {target, system.image, system.kernel.vmlinux.parent})
    return target


def _prepare(settings: LabSettings, machine: LabMachine, progress: Progress) -> bool:
    """Let a node of each hypervisor make its template; whether that of the first could."""
    machine.wait()
    sync(settings, machine.channel)
    env = environment(settings)
    vmms = [vmm for vmm in VMMS if missing(vmm, env) is None]
    for vmm in vmms:
        if machine.channel.call(f"cd {CHECKOUT} && .venv/bin/python -m lab.homes {vmm}", env) != 0:
            progress(f"the node with {vmm} could not be prepared: tests have to do it")
            if vmm == vmms[0]:
                return False
    return True
