"""Peak memory of `draft-jax prepare` against the number of rows.

    python -m benchmarks.prepare_memory TARGET_FOLDER CONVERSATIONS.jsonl.gz --times 1 20 [--same] [--KEY=VALUE]

The conversations are repeated `--times` times in one file, each copy's questions with a number of their own in front,
so that no row equals another one (`--same` repeats them as they are); further keys are the run's. What is measured is
the whole process tree, ten times a second: resident set size, summed (what processes share counts in each), and
proportional set size (shared pages are divided among those who map them), of which the anonymous part is memory that
only the program can free; the rest are pages of files, which the system takes back when it needs them.
"""

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def repeat_rows(source: Path, target: Path, times: int, same: bool) -> int:
    """Writes the rows of a .jsonl.gz file `times` times. Returns how many rows were written."""
    count = 0
    with gzip.open(target, "wt", encoding="utf-8", compresslevel=1) as file:
        for copy in range(times):
            with gzip.open(source, "rt", encoding="utf-8") as lines:
                for line in lines:
                    row = json.loads(line)
                    if not same:
                        row["id"] = f"{copy}-{row['id']}"
                        messages = row.get("messages") or row["conversations"]
                        for message in messages:
                            if message["role"] == "user":
                                message["content"] = f"{copy}. {message['content']}"
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                    count += 1
    return count


def tree(root: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, waiting = [], [root]
    while waiting:
        found.append(waiting.pop())
        waiting += children.get(found[-1], [])
    return found


def memory(processes: list[int]) -> dict[str, int]:
    """MiB by kind, summed over processes."""
    total = dict.fromkeys(("Rss", "Pss", "Pss_Anon", "Pss_File"), 0)
    for process in processes:
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]
        except OSError:
            continue  # it has ended
        sizes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        for name in total:
            total[name] += sizes.get(name, 0)
    return {name: kib // 1024 for name, kib in total.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="folder of the target")
    parser.add_argument("conversations", type=Path)
    parser.add_argument("--times", type=int, nargs="+", default=[1, 20])
    parser.add_argument("--same", action="store_true", help="repeat the rows unchanged")
    parser.add_argument("--workers", type=int, default=2)
    args, keys = parser.parse_known_args()
    for times in args.times:
        with tempfile.TemporaryDirectory() as folder:
            rows = repeat_rows(args.conversations, Path(folder) / "rows.jsonl.gz", times, args.same)
            command = [
                sys.executable, "-m", "train.cli", "prepare", f"--target.path={args.target}",
                f"--data.path={folder}/rows.jsonl.gz", f"--output={folder}/prepared", f"--workers={args.workers}",
                "--logging.progress=false", *keys,
            ]  # fmt: skip
            begin = time.perf_counter()
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            peak: dict[str, int] = {}
            at: dict[str, float] = {}
            while process.poll() is None:
                for name, mib in memory(tree(process.pid)).items():
                    if mib > peak.get(name, -1):
                        peak[name], at[name] = mib, time.perf_counter() - begin
                time.sleep(0.1)
            seconds = time.perf_counter() - begin
            output = process.communicate()[0]
            peaks = ", ".join(f"{name} {mib} (at {at[name]:.0f} s)" for name, mib in peak.items())
            print(f"{times} times, {rows:,} rows, exit {process.returncode}, {seconds:.0f} s; peaks in MiB: {peaks}")
            print(output, flush=True)


if __name__ == "__main__":
    main()
