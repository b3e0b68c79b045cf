"""Messages to the user: one line each, of a length that can be read."""

from kda_engine.errors import MOST_CHARACTERS


def one_line(message):
    """str(message) without line breaks and other control characters, its end left out where it is too long."""
    text = str(message)
    if len(text) > MOST_CHARACTERS:
        text = f"{text[: MOST_CHARACTERS - 200]} ... {text[-180:]}"
    return "".join(c if c.isprintable() else " " if c.isspace() else ascii(c)[1:-1] for c in text)


def counted(number, noun):
    """As "1 rank" and "2 ranks"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
