"""``python -m lab``: runs tests in the lab, opens shells in it, keeps labs in the background.

test [PYTEST ARGUMENTS]      a fresh lab runs tests (tests/lab unless paths are given) and ends
bench [ARGUMENTS]            a fresh lab measures (bench/lab.py) and ends
shell [COMMAND]              a fresh lab runs a shell, or one command, and ends
prepare                      make the disks and nothing else

start NAME                   a lab in the background; what follows is for those
sync NAME                    bring the checkout as it is now (start has done it)
exec NAME [COMMAND]          run a shell command, or a shell
put NAME FILE FOLDER         copy a file or folder into a folder of the lab
get NAME FILE FOLDER         copy a file or folder out of the lab
stop NAME, list
"""

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from aenv.errors import AenvError
from lab.disk import ensure_system, locked
from lab.machine import LabMachine, LabPanicError, remove_dead
from lab.prepare import ATTEMPTS, ensure_home, environment, existing_home, sync
from lab.settings import CHECKOUT, ROOT, LabSettings

LOGS = "/var/log/lab"
TEST_TIMEOUT = 1800  # seconds for one test, unless it says otherwise


def say(text: str) -> None:
    print(f"lab: {text}", flush=True)


def _start(settings: LabSettings, name: str, *, background: bool, prepared: bool) -> LabMachine:
    """Only tests wait for prepared nodes to be made again; a shell takes them where they are up to date."""
    system = asyncio.run(ensure_system(settings, say))
    disk = ensure_home(settings, system, say) if prepared else existing_home(settings, system)
    machine = LabMachine(settings, name)
    with locked(settings.cache):
        remove_dead(settings)
        machine.start(disk, system.kernel, background=background)
    try:
        say("booting")
        machine.wait()
        sync(settings, machine.channel)
    except BaseException as error:
        try:
            if isinstance(error, Exception):
                machine.check()
        finally:
            machine.stop()
        raise
    return machine


@contextmanager
def fresh(settings: LabSettings, *, prepared: bool) -> Iterator[LabMachine]:
    """A lab that ends with this block."""
    machine = _start(settings, f"run-{os.getpid()}", background=False, prepared=prepared)
    try:
        yield machine
    finally:
        machine.stop()


def chosen(root: Path, arguments: list[str]) -> list[str]:
    """pytest's arguments, with the lab's own tests where they name no file or folder of the checkout."""
    named = [argument.split("::")[0] for argument in arguments if not argument.startswith("-")]
    return arguments if any((root / name).exists() for name in named) else ["tests/lab", *arguments]


def test(settings: LabSettings, arguments: list[str]) -> int:
    command = (
        f".venv/bin/python -m pytest --timeout={TEST_TIMEOUT} --basetemp={LOGS}/pytest "
        f"--junitxml={LOGS}/junit.xml {shlex.join(chosen(ROOT, arguments))}"
    )
    return _with_results(settings, command, prepared=True)


def bench(settings: LabSettings, arguments: list[str]) -> int:
    return _with_results(
        settings, f".venv/bin/python -m bench.lab --json {LOGS}/bench.json {shlex.join(arguments)}", prepared=False
    )


def _with_results(settings: LabSettings, command: str, *, prepared: bool) -> int:
    for attempt in range(1, ATTEMPTS):
        try:
            return _run_once(settings, command, prepared=prepared)
        except LabPanicError as panic:
            say(f"{panic} Once more.")
            settings.results.mkdir(parents=True, exist_ok=True)
            (settings.results / f"panic-{attempt}.log").write_text(panic.console)
    return _run_once(settings, command, prepared=prepared)


def _run_once(settings: LabSettings, command: str, *, prepared: bool) -> int:
    with fresh(settings, prepared=prepared) as machine:
        try:
            line = f"mkdir -p {LOGS} && cd {CHECKOUT} && exec {command}"
            status = machine.channel.call(line, environment(settings))
        finally:
            _bring_results(settings, machine)
        if status != 0:
            machine.check()
        return status


def _bring_results(settings: LabSettings, machine: LabMachine) -> None:
    """Report, logs of servers and machines, kernel log and console, over those of the last run."""
    results = settings.results
    # Only what a former run put there.
    for name in ("junit.xml", "dmesg.log", machine.console.name, "bench.json", "pytest"):
        path = results / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    results.mkdir(parents=True, exist_ok=True)
    if machine.pid() is not None:
        machine.channel.call(f"dmesg > {LOGS}/dmesg.log")
        names = "$(find . -type f \\( -name '*.log' -o -name '*.xml' -o -name '*.json' \\) -size -65536k)"
        machine.channel.get_tree(LOGS, names, results)
    with contextlib.suppress(OSError):
        shutil.copyfile(machine.console, results / machine.console.name)
    say(f"report and logs are in {results}")


def shell(settings: LabSettings, arguments: list[str]) -> int:
    with fresh(settings, prepared=False) as machine:
        return _run(settings, machine, arguments)


def _run(settings: LabSettings, machine: LabMachine, arguments: list[str]) -> int:
    """One argument is a shell command; several are a program and its arguments."""
    command = arguments[0] if len(arguments) == 1 else shlex.join(arguments)
    if not arguments:
        return machine.channel.call(None, environment(settings))
    return machine.channel.call(f"cd {CHECKOUT} && {{ {command}\n}}", environment(settings))


def prepare(settings: LabSettings, arguments: list[str]) -> int:
    system = asyncio.run(ensure_system(settings, say))
    disk = ensure_home(settings, system, say)
    say(f"prepared: {disk.name} over {system.image.name}")
    return 0 if disk != system.image else 1


def start(settings: LabSettings, arguments: list[str]) -> int:
    machine = _start(settings, arguments[0], background=True, prepared=False)
    say(f"{machine.name} is ready; its console is {machine.console}")
    return 0


def execute(settings: LabSettings, arguments: list[str]) -> int:
    return _run(settings, LabMachine(settings, arguments[0]), arguments[1:])


def sync_again(settings: LabSettings, arguments: list[str]) -> int:
    sync(settings, LabMachine(settings, arguments[0]).channel)
    return 0


def put(settings: LabSettings, arguments: list[str]) -> int:
    name, source, target = arguments
    path = Path(source).resolve()
    LabMachine(settings, name).channel.put_tree(path.parent, [path.name], Path(target))
    return 0


def get(settings: LabSettings, arguments: list[str]) -> int:
    name, source, target = arguments
    path = Path(source)
    LabMachine(settings, name).channel.get_tree(str(path.parent), shlex.quote(path.name), Path(target))
    return 0


def stop(settings: LabSettings, arguments: list[str]) -> int:
    LabMachine(settings, arguments[0]).stop()
    return 0


def listed(settings: LabSettings, arguments: list[str]) -> int:
    with locked(settings.cache):
        remove_dead(settings)
    for folder in sorted(settings.machines.iterdir()) if settings.machines.exists() else ():
        print(f"{folder.name}  pid {LabMachine(settings, folder.name).pid()}")
    return 0


Verb = Callable[[LabSettings, list[str]], int]
VERBS: dict[str, tuple[Verb, int, int]] = {  # and how many arguments it takes
    "test": (test, 0, 1000),
    "bench": (bench, 0, 1000),
    "shell": (shell, 0, 1000),
    "prepare": (prepare, 0, 0),
    "start": (start, 1, 1),
    "exec": (execute, 1, 1000),
    "sync": (sync_again, 1, 1),
    "put": (put, 3, 3),
    "get": (get, 3, 3),
    "stop": (stop, 1, 1),
    "list": (listed, 0, 0),
}


def main(argv: list[str]) -> int:
    verb, least, most = VERBS.get(argv[0] if argv else "", (None, 0, 0))
    arguments = argv[1:]
    if verb is None or not least <= len(arguments) <= most:
        print(__doc__)
        return 2
    # Whoever is told to end still brings back what there is, and takes the lab down.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        return verb(LabSettings.read(), arguments)
    except KeyboardInterrupt:
        return 130
    except AenvError as error:
        say(f"error: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
