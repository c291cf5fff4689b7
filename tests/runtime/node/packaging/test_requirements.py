"""Which requirements are met, which are not, and which lines are refused."""

import contextlib
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import RequirementsError
from pilotflame.runtime.node.packaging.requirements import (
    check_requirements,
    installed_versions,
    parse_requirements,
    requirements_digest,
)

INSTALLED = {
    "numpy": "2.4.6",
    "Typing_Extensions": "4.16.0",
    "torch": "2.13.0+cpu",
    "rc": "2.0rc1",
    "odd": "unknown",
}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing\n\n   \n",
        "numpy",
        "NumPy >= 2, < 3  # fast",
        "typing.extensions==4.16.0",
        "torch==2.13.0",
        "rc>=1",
        "odd",
        'missing; python_version < "3"',
        "numpy \\\n  >=2",
        "\ufeffnumpy",
        "numpy==2.4.6 --hash=sha256:" + "ab" * 32,
        "numpy==2.4.6 \\\n    --hash=sha256:" + "ab" * 32 + " \\\n    --hash=sha256:" + "cd" * 32,
        "--require-hashes\nnumpy==2.4.6",
        "numpy[extra]",
    ],
)
def test_met(text: str) -> None:
    check_requirements(text, INSTALLED)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# a\n\nflask", "line 3: flask is not installed"),
        ("numpy<2", "line 1: numpy<2 is wanted, 2.4.6 is installed"),
        ("a \\\n>=1\nflask", "line 1: a>=1 is not installed; line 3: flask is not installed"),
        ("odd>1", "odd>1 is wanted, unknown is installed"),
        ('flask; sys_platform == "linux"', "flask is not installed"),
    ],
)
def test_unmet(text: str, expected: str) -> None:
    with pytest.raises(RequirementsError) as caught:
        check_requirements(text, INSTALLED)
    assert expected in caught.value.message
    assert "pip install '" in caught.value.remedy
    assert "pilotflame deploy --install" in caught.value.remedy


def test_long_lines_take_no_longer_than_their_length_and_long_files_are_refused() -> None:
    assert [
        found.requirement.name for found in parse_requirements("a # b\n" + " " * 200_000 + "#\n# c\n")
    ] == ["a"]
    with pytest.raises(RequirementsError, match="more than 262144 characters"):
        parse_requirements("a\n" * 200_000)


def test_markers_are_of_this_interpreter() -> None:
    check_requirements('flask; sys_platform == "win32"', {})
    with pytest.raises(RequirementsError):
        check_requirements('flask; sys_platform != "win32"', {})


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("-r other.txt", "another file"),
        ("-rother.txt", "another file"),
        ("--requirement=other.txt", "another file"),
        ("-c versions.txt", "constraints"),
        ("-e .", "editable"),
        ("--index-url https://example.org", "options"),
        ("-i https://example.org", "options"),
        ("--pre", "options"),
        ("numpy --config-settings=a=b", "options"),
        ("https://example.org/a-1.whl", "a link"),
        ("git+https://example.org/a", "a link"),
        ("a @ https://example.org/a-1.whl", "a link"),
        ("a@https://example.org/a-1.whl", "a link"),
        ("./a", "a link"),
        ("a-1.0-py3-none-any.whl", "a link"),
        ("not a requirement", "line 2"),
        ("numpy==", "line 2"),
        ("numpy; sys_platform ~= 'l'", "its marker has no meaning"),
        ("numpy; 'x' in extras", "marker"),
        ("numpy; " + "(" * 900, "too many parentheses"),
        ("numpy; python_version > '" + "1" * 5000 + "'", "more than 1000 characters"),
        ("numpy" + ",".join(["==1"] * 60_000), "more than 1000 characters"),
    ],
)
def test_refused(line: str, reason: str) -> None:
    with pytest.raises(RequirementsError) as caught:
        requirements_digest(f"numpy\n{line}\n")
    assert "line 2" in caught.value.message
    assert repr(line[:1000]) in caught.value.message
    assert reason in caught.value.message
    assert caught.value.remedy


def test_this_interpreters_own_packages() -> None:
    check_requirements("pydantic>=2\npackaging")
    with pytest.raises(RequirementsError, match="surely-not-there is not installed"):
        check_requirements("surely-not-there")


def test_the_dependencies_of_extras_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = {
        "base": ['deep[more]; extra == "x"', "plain", 'other; extra == "y"'],
        "deep": ['leaf>9; extra == "more"'],
    }
    monkeypatch.setattr("importlib.metadata.requires", needs.__getitem__)
    monkeypatch.setattr(
        "pilotflame.runtime.node.packaging.requirements.installed_versions",
        lambda: {"base": "1", "deep": "1", "leaf": "1"},
    )
    with pytest.raises(RequirementsError, match="line 1: leaf>9 is wanted, 1 is installed"):
        check_requirements("base[x]")


def test_the_digest_is_of_the_requirements() -> None:
    same = [
        'b>=1,<2\nA[z,y]==1; python_version > "3"',
        '# c\nA[y, z] == 1 ; python_version > "3"\n\nB <2, >=1\nb<2,>=1',
    ]
    assert len({requirements_digest(text) for text in same}) == 1
    assert requirements_digest("a==1") != requirements_digest("a==2")
    assert requirements_digest("a==1") != requirements_digest("a==1 --hash=sha256:" + "0" * 64)
    assert requirements_digest("a==1") != requirements_digest("--require-hashes\na==1")
    assert requirements_digest("") == requirements_digest("# nothing")


@given(st.lists(st.sampled_from(["a", "b>1", "c[x]", "d==2 # why", "", "# e"])), st.randoms())
def test_the_digest_ignores_order(lines: list[str], random: object) -> None:
    shuffled = list(lines)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert requirements_digest("\n".join(lines)) == requirements_digest("\n".join(shuffled))


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(RequirementsError):
        requirements_digest(text)


def test_the_first_of_two_versions_counts(tmp_path_factory: pytest.TempPathFactory) -> None:
    folders = []
    for version in ("1", "2"):
        folder = tmp_path_factory.mktemp("site")
        (folder / f"twice-{version}.dist-info").mkdir()
        (folder / f"twice-{version}.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: Twice\nVersion: {version}\n"
        )
        folders.append(str(folder))
    assert installed_versions(folders) == {"twice": "1"}
    assert "pydantic" in installed_versions(sys.path)


@pytest.mark.parametrize("text", ["runpod==1.7.9", "RunPod >= 1  # any", "runpod\nnumpy"])
def test_a_stand_in_meets_any_requirement(text: str) -> None:
    check_requirements(text, INSTALLED, stood_in=("runpod",))
    with pytest.raises(RequirementsError, match=r"(?i)runpod.* is not installed"):
        check_requirements(text, INSTALLED)
    # If the real package is installed, its version must meet the requirement.
    with pytest.raises(RequirementsError, match=r"runpod==1.7.9 is wanted"):
        check_requirements("runpod==1.7.9", {**INSTALLED, "runpod": "1.12.0"}, stood_in=("runpod",))
    with pytest.raises(RequirementsError, match="runpod-flash"):
        check_requirements("runpod-flash", INSTALLED, stood_in=("runpod",))


def test_many_lines_are_refused_before_they_are_parsed() -> None:
    with pytest.raises(RequirementsError, match="more than 2000 lines"):
        requirements_digest("a\n" * 2001)
    assert requirements_digest("a\n" * 2000)


def test_the_first_faults_are_named() -> None:
    with pytest.raises(RequirementsError) as refused:
        parse_requirements("--pre\n" * 30)
    assert "line 20," in refused.value.message
    assert "line 21," not in refused.value.message
    missing = "".join(f"missing{number}\n" for number in range(30))
    with pytest.raises(RequirementsError) as unmet:
        check_requirements(missing, INSTALLED)
    assert "missing19 " in unmet.value.message
    assert "missing20" not in unmet.value.message + (unmet.value.remedy or "")
