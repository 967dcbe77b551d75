"""What the parts of the bench share: programs that print figures, and tables of them."""
import json, os, subprocess, sys


def lines(command, **environment):
    """Runs a program, and returns the JSON lines that it prints."""
    print("$", " ".join(command), file=sys.stderr, flush=True)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ, **environment)) as process:
        found = [json.loads(line) for line in process.stdout if line.startswith("{")]
    if process.returncode != 0:
        # Not all for nothing.
        print(*map(json.dumps, found), sep="\n")
        sys.exit(f"{command[0]} failed with {process.returncode}")
    return found


def three_digits(figure):
    """12.3 and the like."""
    return f"{figure:,.{2 if figure < 10 else 1 if figure < 100 else 0}f}"


def table(head, rows):
    """Prints a table as documents have it."""
    print("| " + " | ".join(head) + " |", "|" + "---|" * len(head), sep="\n")
    for row in rows:
        print("| " + " | ".join(row) + " |")
