"""As whom and where steps of builds run, and the sandboxes after them."""

from dataclasses import replace

import pytest

from aenv.template.context import Context, after_dockerfile, of_dockerfile, of_image
from aenv.template.keys import of_dockerfile as dockerfile_key
from aenv.template.steps import Action, Run, Step, User, Workdir


def test_steps_of_the_sdk_begin_as_user_in_its_home() -> None:
    assert of_image({"A": "b"}, "", "/") == Context({"A": "b"}, "user", None)
    assert of_image({}, "app:app", "/srv") == Context({}, "app", "/srv")


@pytest.mark.parametrize(
    ("user", "workdir", "expected"),
    [
        ("", "", Context({}, "root", "/")),
        ("0:0", "/", Context({}, "root", "/")),
        ("app:staff", "/srv", Context({}, "app", "/srv")),
        ("user", "", Context({}, "user", "/")),
    ],
)
def test_steps_of_a_dockerfile_begin_as_docker_has_it(user: str, workdir: str, expected: Context) -> None:
    assert of_dockerfile({}, user, workdir) == expected


def finished(began: Context, *actions: Action) -> tuple[str, str | None]:
    """User and folder of sandboxes."""
    context = began
    for action in actions:
        if isinstance(action, User):
            context = replace(context, user=action.name)
        elif isinstance(action, Workdir):
            context = replace(context, workdir=action.path)
    made = after_dockerfile(context, began, [Step(number, action) for number, action in enumerate(actions, 1)])
    return made.user, made.workdir


def test_sandboxes_run_as_image_and_dockerfile_say_else_as_user_in_its_home() -> None:
    nobody = of_dockerfile({}, "", "")
    assert finished(nobody, Run("x", None)) == ("user", None)
    assert finished(nobody, User("root")) == ("root", None)
    assert finished(nobody, Workdir("/app")) == ("user", "/app")
    assert finished(nobody, User("app"), Workdir("/")) == ("app", "/")
    image = of_dockerfile({}, "app", "/srv")
    assert finished(image) == ("app", "/srv")
    assert finished(image, User("other"), Workdir("/opt")) == ("other", "/opt")


def test_results_of_other_users_are_other_results() -> None:
    assert dockerfile_key("origin") != "origin"
