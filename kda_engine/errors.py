"""The one error that users of the engine are meant to catch."""

# Of a message: enough for a list of a golden's tensors.
MOST_CHARACTERS = 4000


class InputError(ValueError):
    """An argument, option or file that cannot be used: says which, what was expected and what came."""

    def __str__(self):
        """At most MOST_CHARACTERS: what came may be text of megabytes."""
        text = super().__str__()
        if len(text) > MOST_CHARACTERS:
            text = f"{text[: MOST_CHARACTERS - 200]} ... {text[-180:]}"
        return text
