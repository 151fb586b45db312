"""Steps as the SDK sends them, their expansion and their keys."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.errors import InvalidRequestError
from aenv.template import keys
from aenv.template.context import DEFAULT_PATH, Context, of_image
from aenv.template.expand import expand
from aenv.template.plan import is_captured, resume_at, reusable, step_keys
from aenv.template.steps import Copy, Env, RawStep, Run, Step, User, Workdir, parse

DIGEST = "0" * 64


def one(kind: str, *args: str, **more: object) -> object:
    return parse([RawStep(kind, args, **more)])[0].action  # type: ignore[arg-type]


def test_the_five_kinds() -> None:
    assert one("RUN", "make all") == Run("make all", None)
    assert one("RUN", "make all", "root") == Run("make all", "root")
    assert one("COPY", "a", "/b", "", "", files_hash=DIGEST) == Copy("a", "/b", "", "", DIGEST)
    assert one("COPY", "a/**", "b/", "user:adm", "0755", files_hash=DIGEST) == Copy(
        "a/**", "b/", "user:adm", "0755", DIGEST
    )
    assert one("ENV", "A", "1", "B", "$A") == Env((("A", "1"), ("B", "$A")))
    assert one("WORKDIR", "/srv") == Workdir("/srv")
    assert one("USER", "user:group") == User("user")


@pytest.mark.parametrize(
    ("kind", "args", "files"),
    [
        ("RUN", [], None),
        ("RUN", [" "], None),
        ("RUN", ["a", "b", "c"], None),
        ("RUN", ["a\0"], None),
        ("RUN", ["x" * (128 * 1024)], None),
        ("COPY", ["a", "/b"], None),
        ("COPY", ["a", "/b"], "short"),
        ("COPY", ["../a", "/b"], DIGEST),
        ("COPY", ["/a", "/b"], DIGEST),
        ("COPY", ["a", ""], DIGEST),
        ("COPY", ["a", "/b", "a b", ""], DIGEST),
        ("COPY", ["a", "/b", "", "rwx"], DIGEST),
        ("ENV", ["A"], None),
        ("ENV", [], None),
        ("ENV", ["A=B", "1"], None),
        ("ENV", ["", "1"], None),
        ("WORKDIR", [""], None),
        ("USER", ["a b"], None),
        ("USER", ["-x"], None),
        ("ADD", ["a", "b"], None),
    ],
)
def test_wrong_steps_are_refused_by_number(kind: str, args: list[str], files: str | None) -> None:
    with pytest.raises(InvalidRequestError, match="Step 2"):
        parse([RawStep("RUN", ["true"]), RawStep(kind, args, files)])


def test_labels_are_one_short_line() -> None:
    step = parse([RawStep("RUN", ["echo a\necho " + "b" * 500])])[0]
    assert step.label.startswith("RUN echo a echo bbb")
    assert len(step.label) == 200


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$A", "1"),
        ("${A}b", "1b"),
        ("$AB", ""),
        ("$A/$B", "1/"),
        ("${B:-x$A}", "x1"),
        ("${A:-x}", "1"),
        ("${A:+y}", "y"),
        ("${B:+y}", ""),
        (r"\$A", "$A"),
        (r"\\$A", r"\1"),
        ("100%", "100%"),
        ("$", "$"),
        ("$(date)", "$(date)"),
        ("${A", "${A"),
        ("$1", "$1"),
    ],
)
def test_expansion(text: str, expected: str) -> None:
    assert expand(text, {"A": "1"}) == expected


@given(st.text(alphabet=st.characters(exclude_characters="$\\")))
def test_text_without_references_is_unchanged(text: str) -> None:
    assert expand(text, {"A": "1"}) == text


@given(st.text(), st.dictionaries(st.sampled_from(["A", "B"]), st.text()))
def test_expansion_never_fails(text: str, variables: dict[str, str]) -> None:
    expand(text, variables)


def test_context_folds_variables_in_order() -> None:
    context = Context().with_env((("A", "1"), ("B", "$A$A"), ("PATH", "/opt/bin:$PATH"), ("H", "$HOME")))
    assert context.env == {"A": "1", "B": "11", "PATH": f"/opt/bin:{DEFAULT_PATH}", "H": "/home/user"}
    assert replace(context, user="root").expand("$HOME/$B") == "/root/11"


def test_what_an_image_says() -> None:
    assert of_image({"A": "1"}, "", "/") == Context({"A": "1"}, "user", None)
    assert of_image({}, "root", "/app") == Context({}, "user", "/app")
    assert of_image({}, "node:node", "") == Context({}, "node", None)


STEPS = st.lists(
    st.sampled_from(
        [
            RawStep("RUN", ["a"]),
            RawStep("RUN", ["a"], force=True),
            RawStep("RUN", ["b"]),
            RawStep("ENV", ["A", "1"]),
            RawStep("USER", ["root"]),
            RawStep("COPY", ["a", "b"], DIGEST),
            RawStep("COPY", ["a", "b"], "1" * 64),
        ]
    ),
    max_size=8,
).map(parse)


@given(STEPS, STEPS)
def test_keys_follow_everything_before_them(first: tuple[Step, ...], second: tuple[Step, ...]) -> None:
    left, right = step_keys("origin", first), step_keys("origin", second)
    for index in range(min(len(first), len(second))):
        same = [step.action for step in first[: index + 1]] == [step.action for step in second[: index + 1]]
        assert (left[index] == right[index]) == same
    assert not set(left) & set(step_keys("other origin", first))


@given(STEPS, st.data(), st.booleans())
def test_a_build_resumes_after_the_deepest_layer_it_may_use(
    steps: tuple[Step, ...], data: st.DataObject, force: bool
) -> None:
    chain = step_keys(keys.of_snapshot("s"), steps)
    cached = set(data.draw(st.lists(st.sampled_from(chain)))) if chain else set()
    count = resume_at(steps, chain, cached, force=force)
    assert 0 <= count <= reusable(steps, force=force)
    if count:
        assert chain[count - 1] in cached and is_captured(steps[count - 1])
    for deeper in range(count + 1, reusable(steps, force=force) + 1):
        assert chain[deeper - 1] not in cached or not is_captured(steps[deeper - 1])
    if force:
        assert count == 0
    assert not any(step.force for step in steps[:count])
