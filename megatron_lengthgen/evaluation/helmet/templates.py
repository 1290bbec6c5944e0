"""The task texts that the benchmark defines: for the user, and the start of the answer.

Source: princeton-nlp/HELMET ``data.py`` (MIT licence, Princeton Natural Language Processing), which took some from
NVIDIA/RULER, nelson-liu/lost-in-the-middle and OpenBMB/InfiniteBench. They are data: a prompt must match to the byte.
"""

from dataclasses import dataclass

__all__ = ["TEMPLATES", "Template"]


@dataclass(frozen=True)
class Template:
    """Args:
    user: text for the user, with ``{context}`` where the long text goes.
    system: start of the answer.
    between: what stands between the two in a plain prompt.
    """

    user: str
    system: str
    between: str = "\n"


_NEEDLE = Template(
    "A special magic {type_needle_v} is hidden within the following text. Make sure to memorize it. I will quiz you "
    "about the {type_needle_v} afterwards.\n{context}\nWhat is the special magic {type_needle_v} for {query} mentioned "
    "in the provided text?",
    "The special magic {type_needle_v} for {query} mentioned in the provided text is",
)

_KILT = Template(
    "Use the given documents to write a concise and short answer to the question. Write your answer in the following "
    "format:\nAnswer: [answer]\n\n{demos}{context}\n\nQuestion: {question}",
    "Answer:",
)

_ALCE = Template("{demo_text}{instruction}\n\nQuestion: {question}\n\n{context}", "Answer:", "\n\n")

_ICL = Template(
    'Use the provided mapping from the text to label to assign a label to the text. Only output "label: {{label}}" '
    "and nothing else. \n\n{context}\n\n{question}",
    "label:",
)

#: By name of the data set; those that share one are listed after it.
TEMPLATES = {
    "ruler_niah_mk_2": _NEEDLE,
    "ruler_niah_mk_3": _NEEDLE,
    "ruler_niah_mv": Template(
        "Some special magic {type_needle_v} are hidden within the following text. Make sure to memorize it. I will "
        "quiz you about the {type_needle_v} afterwards.\n{context}\nWhat are all the special magic {type_needle_v} for "
        "{query} mentioned in the provided text?",
        "The special magic {type_needle_v} for {query} mentioned in the provided text are",
    ),
    "json_kv": Template(
        "{context}\n\nExtract the value corresponding to the specified key in the JSON object below.\n\n{demos}Key: "
        "{question}",
        "Corresponding value:",
    ),
    "kilt_nq": _KILT,
    "kilt_triviaqa": _KILT,
    "kilt_hotpotqa": _KILT,
    "kilt_popqa": _KILT,
    "msmarco_rerank_psg": Template(
        "You are provided with a list of documents, each indicated by their ID. Rank each document based on their "
        "relevance to the question in descending order from most relelvant to least relevant texts. Include all "
        "documents in the rankings. Write your answer using the unique IDs, with the following format:\nRanking: ID3 > "
        "ID1 > ID2\n\n{demos}{context}\n\nQuery: {question}",
        "Ranking:",
    ),
    "alce_asqa": _ALCE,
    "alce_qampari": _ALCE,
    "narrativeqa": Template(
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the question as "
        "concisely as you can, using a single phrase if possible.\n\n{demo}{context}\n\nQuestion: {question}",
        "Answer:",
    ),
    "infbench_qa_eng": Template(
        "You are given a story and a question. Answer the question as concisely as you can, using a single phrase if "
        "possible.\n\n{demo}{context}\n\nQuestion: {question}",
        "Answer:",
        "\n\n",
    ),
    "infbench_choice_eng": Template(
        "You are given a story and a question with multiple choices. Choose the best answer from the options provided. "
        "Only one of the following options is correct, output the answer using one single letter (A, B, C, or D). "
        "Don't say anything else.\n\n{demo}{context}\n\nQuestion: {question}\nOptions:\n{options}",
        "Answer:",
        "\n\n",
    ),
    "infbench_sum_eng": Template(
        "You are given a book and you are tasked to summarize it. Write a summary of about 1000 to 1200 words. Only "
        "write about the plot and characters of the story. Do not discuss the themes or background of the book. Do not "
        "provide any analysis or commentary.\n\n{demo}{context}\n\nNow summarize the book.",
        "Summary:",
        "\n\n",
    ),
    "multi_lexsum": Template(
        "You are given the legal documents in a civil rights lawsuit, and you are tasked to summarize the case. Write "
        "a concise summary of one paragraph (200 to 250 words). The summary should contain a short description of the "
        "background, the parties involved, and the outcomes of the case.\n\n{demo}Legal documents:\n{context}\n\nNow "
        "please summarize the case.",
        "Summary:",
        "\n\n",
    ),
    "icl_trec_coarse": _ICL,
    "icl_trec_fine": _ICL,
    "icl_banking77": _ICL,
    "icl_clinic150": _ICL,
    "icl_nlu": _ICL,
}
