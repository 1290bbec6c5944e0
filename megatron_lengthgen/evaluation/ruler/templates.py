"""The benchmark's texts, byte for byte.

Source: NVIDIA/RULER (Apache-2.0), ``scripts/data/synthetic/constants.py``, ``niah.py`` and ``qa.py`` beside it.
They are data: a changed letter is another benchmark.
"""

__all__ = [
    "COMMON_WORDS",
    "COMMON_WORDS_PREFIX",
    "DOCUMENT",
    "FREQUENT_WORDS",
    "FREQUENT_WORDS_PREFIX",
    "NEEDLE",
    "NIAH",
    "NIAH_PREFIX",
    "NOISE",
    "QUESTION_ANSWERING",
    "QUESTION_ANSWERING_PREFIX",
    "VARIABLE_TRACKING",
    "VARIABLE_TRACKING_PREFIX",
    "singular",
]

NIAH = (
    "Some special magic {type_needle_v} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {type_needle_v} afterwards.\n{context}\n"
    "What are all the special magic {type_needle_v} for {query} mentioned in the provided text?"
)
NIAH_PREFIX = " The special magic {type_needle_v} for {query} mentioned in the provided text are"

NEEDLE = "One of the special magic {type_needle_v} for {key} is: {value}."

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

VARIABLE_TRACKING = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {query} in the text above."
)
VARIABLE_TRACKING_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {num_v} variables are assigned the "
    "value {query}, they are: "
)

COMMON_WORDS = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
    "Question: What are the 10 most common words in the above list?"
)
COMMON_WORDS_PREFIX = " Answer: The top 10 words that appear most often in the list are:"

FREQUENT_WORDS = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. {context}\n"
    "Question: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?"
)
FREQUENT_WORDS_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"

QUESTION_ANSWERING = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\n{context}\n\n"
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "Question: {query}"
)
QUESTION_ANSWERING_PREFIX = " Answer:"
DOCUMENT = "Document {i}:\n"


def singular(template: str) -> str:
    """The wording that RULER uses when one value is asked for.

    RULER edits the template after the chat template has been wrapped around it, and so rewrites words of the chat
    template too; here only the task's own text passes through.
    """
    for plural, single in (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer")):
        template = template.replace(plural, single)
    return template
