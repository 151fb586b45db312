"""``aenv completion``."""

import click
from click.shell_completion import get_completion_class

from aenv.cli.help import command
from aenv.cli.main import COMPLETE, root


@command(
    "completion",
    """
eval "$(aenv completion bash)"       # in ~/.bashrc
eval "$(aenv completion zsh)"        # in ~/.zshrc, after compinit
aenv completion fish > ~/.config/fish/completions/aenv.fish
""",
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]), metavar="SHELL", help="bash, zsh or fish.")
def completion(shell: str) -> None:
    """Print the completion script of a shell. It completes commands, options, ids and names."""
    found = get_completion_class(shell)
    assert found is not None
    print(found(root, {}, "aenv", COMPLETE).source())
