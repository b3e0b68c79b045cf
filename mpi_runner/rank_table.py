"""Who is where: each rank's host, cores and GPU."""

import socket

HEAD = ("rank", "host", "rank on host", "threads", "GPU")


def rank_row(session, devices):
    """This rank's row, plain values. devices: the GPUs it sees, as `environment.gpus` lists them."""
    number = session.device_number(len(devices)) if devices else None
    return {"rank": session.rank, "host": socket.gethostname(), "rank_on_host": session.node.rank,
            "threads": session.threads(), "gpu": None if number is None else {"number": number, **devices[number]}}


def mark_shared(rows):
    """Tell each row's GPU whether another rank of the host works on it too."""
    places = [(row["host"], row["gpu"] and row["gpu"]["pci"]) for row in rows]
    for row, place in zip(rows, places):
        if row["gpu"] is not None:
            row["gpu"]["shared"] = places.count(place) > 1
    return rows


def render(rows):
    """The rows as text."""
    table = [HEAD] + [(str(row["rank"]), row["host"], str(row["rank_on_host"]), str(row["threads"]), _gpu(row["gpu"]))
                      for row in rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(HEAD))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table)


def _gpu(gpu):
    if gpu is None:
        return "none"
    return f"{gpu['number']}: {gpu['name']} at {gpu['pci']}" + (", shared" if gpu["shared"] else "")
