"""The shell itself is a newcomer's: nothing of this repository's habits is in it."""

from helpers.shell import Shell


def test_the_shell_has_an_empty_home_and_no_variables_of_the_tests(shell: Shell) -> None:
    said = shell.run("python", "-c", "import os; print(sorted(os.environ))", FMP_API_KEY="key")
    assert said.status == 0
    assert "FMP_API_KEY" in said.terminal
    assert "OMP_NUM_THREADS" not in said.terminal
    assert "PYTHONPATH" not in said.terminal
    assert (shell.folder / "README.md").exists()
    assert not (shell.folder / ".git").exists()
