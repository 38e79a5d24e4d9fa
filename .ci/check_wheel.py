"""
Check a wheel: what is in it, and that it works where nothing else is.

    python .ci/check_wheel.py dist
"""

import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path


ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def check_contents(wheel: Path) -> list[str]:
    """Return what is wrong with the files of a wheel, and with what it says of itself."""
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        info = next(name.split("/")[0] for name in names if name.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(file.read(f"{info}/METADATA").decode())
        entry_points = file.read(f"{info}/entry_points.txt").decode()
    files = (path for path in (ROOT / "mcp_grpo").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    wanted = {str(path.relative_to(ROOT)) for path in files}
    problems = [f"{name} is missing" for name in sorted(wanted - names)]
    problems += [f"{name} does not belong in it" for name in sorted(names - wanted) if not name.startswith(f"{info}/")]
    if "mcp_grpo/py.typed" not in names:
        problems.append("mcp_grpo/py.typed is missing, so that type checkers do not look at it")
    if metadata["Version"] != PROJECT["version"]:
        problems.append(f"its version is {metadata['Version']}, and the project's {PROJECT['version']}")
    extras = set(metadata.get_all("Provides-Extra") or ())
    if extras != PROJECT["optional-dependencies"].keys():
        problems.append(f"its extras are {sorted(extras)}")
    problems += [f"it has no command {name}" for name in PROJECT["scripts"] if f"{name} = " not in entry_points]
    return problems


def check_installed(wheel: Path) -> list[str]:
    """Return what does not work of a wheel in an environment that has only it, and what its command prints with."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        commands = [
            [*pip, "--no-deps", str(wheel.resolve())],
            [python, "-c", "import mcp_grpo.errors; assert 'site-packages' in mcp_grpo.errors.__file__"],
            [*pip, "rich"],
            [str(Path(folder) / "bin" / "mcp-grpo"), "--help"],
        ]
        for command in commands:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode:
                return [f"`{' '.join(command)}` failed: {done.stderr.strip()}"]
    return []


if __name__ == "__main__":
    (found,) = Path(sys.argv[1]).glob("*.whl")
    wrong = check_contents(found) or check_installed(found)
    if wrong:
        sys.exit("\n".join([f"{found.name}:", *wrong]))
    print(f"{found.name}: its contents are right, and it works where nothing else is.")
