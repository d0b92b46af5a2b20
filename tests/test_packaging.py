"""What is installed is what is here: the package list, the wheel, the sdist, and a checkout without links."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BESIDE = ("envs", "policies", "assets", "configs")  # stand beside robotattn/, install inside it
EXPECTED = {
    "robotattn/__init__.py",
    "robotattn/py.typed",
    "robotattn/cli.py",
    "robotattn/experiments/suite.py",
    "robotattn/assets/experiments.html.j2",
    "robotattn/envs/base.py",
    "robotattn/policies/act.py",
    "robotattn/assets/__init__.py",
    "robotattn/configs/__init__.py",
}


def python(*arguments: str, path: Path | None = None, cwd: Path | None = None) -> str:
    """Run Python in a clean process (with `path` in front of everything); return what it printed."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    if path:
        environment["PYTHONPATH"] = str(path)
    ran = subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """A copy of the tree as an archive without symlinks would unpack it."""
    target = tmp_path_factory.mktemp("plain") / "tree"
    target.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target / name)
    skip = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in ("robotattn", *BESIDE):
        shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=skip)
    for name in BESIDE:
        (target / "robotattn" / name).unlink()
    return target


@pytest.fixture(scope="module")
def built(plain: Path) -> Path:
    """The folder with the wheel and the sdist, built from the copy without links."""
    backend = "import sys, setuptools.build_meta as b; to = sys.argv[1]; b.build_sdist(to); b.build_wheel(to)"
    dist = plain.parent / "dist"
    dist.mkdir()
    if not _can_build():
        python("-m", "build", "--outdir", str(dist), str(plain))
    else:
        python("-c", backend, str(dist), cwd=plain)
    return dist


def _can_build() -> bool:
    """Tell whether this environment has a setuptools new enough; otherwise `build` fetches one of its own."""
    code = "import setuptools; print(int(setuptools.__version__.split('.')[0]) >= 77)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return ran.stdout.strip() == "True"


def files_beside() -> set[str]:
    """Every file that must be installed, by its place in the wheel."""
    found = set()
    for name in ("robotattn", *BESIDE):
        for path in (ROOT / name).rglob("*"):
            relative = path.relative_to(ROOT)
            if path.is_symlink() or not path.is_file() or "__pycache__" in path.parts or relative.parts[1] in BESIDE:
                continue
            wanted = path.suffix == ".py" or name == "assets" or path.suffix == ".yaml" or path.name == "py.typed"
            if wanted:
                found.add(f"robotattn/{relative}" if name != "robotattn" else str(relative))
    return found


def test_every_folder_with_python_in_it_is_in_the_list_of_packages():
    """A forgotten folder would vanish from the wheel without a word."""
    inits = [path.parent.relative_to(ROOT) for top in ("robotattn", *BESIDE) for path in (ROOT / top).rglob("*.py")]
    folders = {path for path in inits if not any(part in BESIDE for part in path.parts[1:])}
    named = {".".join(path.parts if path.parts[0] == "robotattn" else ("robotattn", *path.parts)) for path in folders}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == named
    assert len(PROJECT["tool"]["setuptools"]["packages"]) == len(named)


@pytest.mark.parametrize("name", BESIDE)
def test_a_relative_link_inside_the_package_shows_each_folder_to_type_checkers(name: str):
    link = ROOT / "robotattn" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert (ROOT / name / "__init__.py").is_file()
    assert PROJECT["tool"]["setuptools"]["package-dir"][f"robotattn.{name}"] == name


def test_every_dependency_has_a_range_and_a_tested_version():
    """Ranges in pyproject.toml, the tested version in constraints.txt, and the one inside the other."""
    from packaging.requirements import Requirement

    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    tested = {line.split("==")[0].lower().replace("_", "-"): line.split("==")[1] for line in lines}
    project = PROJECT["project"]
    for text in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        requirement = Requirement(text)
        version = tested[requirement.name.lower()]
        assert requirement.specifier.contains(version), f"{text}: tested with {version}"
        assert not any(item.operator == "==" for item in requirement.specifier), f"{text}: not a range"


def test_the_wheel_holds_every_file_and_nothing_outside_the_package(built: Path):
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert names >= EXPECTED | files_beside()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"robotattn"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_sdist_holds_the_four_folders(built: Path):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "robotattn/cli.py"} <= names
    beside = {name for name in files_beside() if name.split("/")[1] in BESIDE}
    assert {name.removeprefix("robotattn/") for name in beside} <= names


def test_the_wheel_imports_and_its_data_files_are_real_paths(built: Path, tmp_path: Path):
    (wheel,) = built.glob("*.whl")
    python("-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path), str(wheel))
    code = (
        "import robotattn, robotattn.configs, robotattn.policies, robotattn.assets as a;"
        "from importlib.resources import files;"
        "print(robotattn.__file__); print(a.path('__init__.py'));"
        "print(len([p for p in files('robotattn.configs').iterdir() if p.name.endswith('.yaml')]))"
    )
    package, asset, configs = python("-c", code, path=tmp_path, cwd=tmp_path).split()
    assert Path(package).is_relative_to(tmp_path)
    assert Path(asset) == tmp_path / "robotattn" / "assets" / "__init__.py"
    assert int(configs) == len(list((ROOT / "configs").glob("*.yaml")))


def test_a_tree_without_links_installs(plain: Path, tmp_path: Path):
    """An archive, or a clone on a system without symlinks, loses the links; installing must not need them."""
    options = ["--no-deps", "--no-build-isolation"] if _can_build() else ["--no-deps"]
    python("-m", "pip", "install", "-q", *options, "--target", str(tmp_path), str(plain))
    code = "import robotattn.policies, robotattn.configs, robotattn.assets; print(robotattn.__file__)"
    assert Path(python("-c", code, path=tmp_path, cwd=tmp_path).strip()).is_relative_to(tmp_path)


def test_importing_the_package_stays_light():
    """`import robotattn` brings neither torch nor the simulator; importing the worlds only registers their names."""
    heavy = "{'torch', 'mujoco', 'gymnasium', 'cv2', 'scipy', 'matplotlib'}"
    assert python("-c", f"import robotattn, sys; print(sorted({heavy} & set(sys.modules)))").strip() == "[]"
    assert python("-c", f"import robotattn.cli, sys; print(sorted({heavy} & set(sys.modules)))").strip() == "[]"


def test_profiling_needs_no_simulator():
    """A bare GPU machine has torch and numpy: policies and latency bring neither the simulator nor OpenCV."""
    world = "{'mujoco', 'gymnasium', 'cv2'}"
    code = f"import robotattn.policies, robotattn.latency.profile, sys; print(sorted({world} & set(sys.modules)))"
    assert python("-c", code).strip() == "[]"


def test_the_worlds_bring_no_torch():
    code = "import robotattn.envs, sys; print('torch' in sys.modules)"
    assert python("-c", code).strip() == "False"
