"""What a mistyped command line may have meant."""

import argparse
import difflib
import re

_INVALID_CHOICE = re.compile(r"invalid choice: '(?P<word>[^']*)' \(choose from (?P<choices>.*)\)")


def hint(message, parser):
    """A line that goes with argparse's error message: the nearest known word, or where to look."""
    for word, known in _candidates(message, parser):
        if word in known:
            # Another command's option: the nearest word would be the one that was typed.
            return f"hint: {word} is an option of {', '.join(_owners(word, parser))}"
        nearest = difflib.get_close_matches(word, known, n=1)
        if nearest:
            return f"hint: did you mean {nearest[0]}?"
    return f"hint: {parser.prog} --help tells what it takes"


def _candidates(message, parser):
    """(word that was not understood, words that would have been)"""
    if found := _INVALID_CHOICE.search(message):
        yield found["word"], [choice.strip("' ") for choice in found["choices"].split(",")]
    if message.startswith("unrecognized arguments: "):
        for word in message.removeprefix("unrecognized arguments: ").split():
            yield word.split("=")[0], sorted(_options(parser))


def _owners(option, parser):
    """Names of the commands that take a long option."""
    if option in (name for action in parser._actions for name in action.option_strings):
        yield parser.prog
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _owners(option, below)


def _options(parser):
    """Long options of a parser and of all below it."""
    for action in parser._actions:
        yield from (name for name in action.option_strings if name.startswith("--"))
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _options(below)
