"""The reward function as OpenRLHF calls it: loaded by path, in threads, one rollout at a time."""

import importlib.util
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("math_verify")

from openrlhf_dbb.rewards import MATH_FILE
from openrlhf_dbb.rewards.verifier_pool import VerifierPool


@pytest.fixture(scope="module")
def module():
    spec = importlib.util.spec_from_file_location("reward_func", MATH_FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module._pool.time_limit_s = 60.0  # of a busy machine
    yield module
    module._pool.close()


@pytest.fixture(scope="module")
def reward(module):
    def score(response, label, prompt="Q: "):
        result = module.reward_func([prompt + response + "<|im_end|>"], [prompt], [label])
        assert result["rewards"] == result["scores"]
        return result["rewards"][0]

    return score


SUM = "What is 7 + 4 - 6 ="
SUM_LABEL = "5"
SIMPLIFY = r"Simplify $\sqrt{12}$."
SIMPLIFY_LABEL = r"2\sqrt{3}"
LONG = "These 12 words follow. " * 400
# Responses to the sum that a person would call wrong, and right.
WRONG = (
    "To find the final answer of 7 + 4 - 6, we would need", "= (5) - ", r"\boxed{7+4-6}", r"$7 + 4 - 6$",
    r"\boxed{10/2}", "The answer is not 5 but 12.", "It isn't 5.", "3, 4 or 5", r"\boxed{3, 4, 5}", "Is it 5?",
    "5. First, add the numbers", r"The answer is \boxed{5", "1. 5\n2. 6", "5 is wrong.", "5 or more", "at least 5",
    "5 at most", "Let x = 5", "I cannot tell whether it is 5.", "more than 5", "If it were 5, then", "x > 5",
    "It cannot be 5.", "5th", "", "I do not think that the answer is 5.", SUM, r"\boxed{???}", "--5",
    r"\boxed{5\text{ wrong}}",
    # bombs
    r"\boxed{" + "1" * 10_000 + "}", r"\boxed{1/" + "3" * 4301 + "}", r"\boxed{" * 20_000 + "5" + "}" * 20_000,
    r"\boxed{" * 5_000, "$ " * 20_000, r"\boxed{" + "(" * 600 + "5" + ")" * 600 + "}",
    "So it is 5.\n" + LONG,  # the window: docs/rewards.md
)  # fmt: skip
RIGHT = (
    "5", "The answer is 3. No wait, 5.", "7 + 4 = 11, and 11 - 6 = 5.", "The answer is **5**, not 12.", "5.0", "05",
    "The answer is 5 (that is 7 + 4 - 6).", r"\boxed{7 + 4 - 6 = 5}", "- 5", "#### 5", "### Answer\n5", "5 = x",
    '{"answer": 5}', "<answer>5</answer>", "**Answer: 5**\n\nThis took 2 steps.", "The answer is 5. I used rule 3.",
    r"\boxed{\Large 5}",
    "5\n\nExplanation: 7 is more than 6.", "It is 5 and not 6.", "There are 5!", "The answer is 5 (mod 10).",
    "Answer: 5. Let me check: 8 - 3 = 5.", "\u7b54\u6848\u662f\uff15\u3002", "\u4e00\u5171\u662f5\u4e2a\u3002",
    "#### 5\n" + LONG,
)  # fmt: skip
MATRIX = r"\begin{pmatrix} 8 & 12 \\ -4 & 20 \end{pmatrix}"
TABLE = [
    *[(SUM, SUM_LABEL, response, False) for response in WRONG],
    *[(SUM, SUM_LABEL, response, True) for response in RIGHT],
    ("Compute.", "12", "1\n2", False),
    ("What is 2+1? (answer: 3)", "3", "What is 2+1? (answer: 3)", False),
    # labels that are no numbers, in plain words
    ("Where is it?", "(3,-2)", "The point is (3, -2).", True),
    ("Expand it.", "x^2+2x+1", "So the result is (x+1)\u00b2.", True),
    ("Which one?", "C", "So it is C.", True),
    ("Which one?", "C", "So it is not C.", False),
    ("Which one?", "C", "Is it C?", False),
    ("Which one?", "C", "So it is C. Or is it D?", False),
    ("Which one?", "C", "It is D.\nSo it is C, I guess.", False),
    ("Invert it.", MATRIX, f"So it is {MATRIX}.", True),
    ("Invert it.", MATRIX, f"The inverse is {MATRIX}.", True),
    ("Invert it.", MATRIX, f"It is not {MATRIX}.", False),
    ("Invert it.", MATRIX, "The answer is $" + MATRIX.replace(r"\\ ", "\\\\\n") + "$.", True),
    ("Invert it.", MATRIX, f"The answer is {MATRIX.replace('8', '9')}.", False),
    ("How large is it?", r"36\pi", "The area is 36\u03c0 square centimetres.", True),
    ("Even or odd?", r"\text{odd}", "The function is not odd.", False),
    ("Even or odd?", r"\text{odd}", "Is it odd?", False),
    ("Even or odd?", r"\text{odd}", "The answer is even. The answer is odd.", False),
    ("Which curve?", r"\text{ellipse}", r"It is an $\boxed{\text{ellipse}}$.", True),
    ("Is it prime?", "yes", "Yes, no number divides it.", True),
    ("Is it prime?", "no", "No, it is not.", True),
    *[
        ("Is it prime?", "yes", both, False)
        for both in ("yes or no", r"\boxed{\text{Yes, no}}", "I cannot say yes.", "Yes/No")
    ],
    ("Is it prime?", "no", "Neither yes nor no.", False),
    ("Is it prime?", "yes", "The answer is no. The answer is yes.", False),
    ("Is it prime?", "yes", "Yes\n\nBecause 7 is prime.", True),
    ("Which one?", r"\text{(E)}", "So the answer is E.", True),
    ("Which one?", r"\text{(E)}", "E?", False),
    ("Which one?", "i", "The answer is $i$.", True),
    ("Which one?", "E", r"\boxed{\left(\text{E}\right)}", True),
    ("Which one?", "MR=SRMC", "The answer is MR=SRMC.", True),
    ("Where is it?", "(1,2)", r"\boxed{(1,2}", False),
    ("Which?", "x \\le 2", r"\boxed{x <= 2}", True),
    ("Square x.", "x^2", r"\boxed{x**2}", True),
    ("Double x.", "2x", r"\boxed{x**2}", False),
    ("How large?", r"\binom52", r"\boxed{\binom{5}{2}}", True),
    ("How much?", r"\$5", "It costs \u00a35.", False),
    ("Which one?", "B", "\u6545\u9009B\u3002", True),
    # what else docs/rewards.md lists as outside
    ("How much?", "3.5", "It costs 3,5.", True),
    ("How much?", "1234", "It costs 1,234.", True),
    ("How many?", "21", "There are twenty-one.", False),
    # values in the question, and formulas copied from it where their value is the answer
    ("The chance of heads is 1/2. And of tails?", "0.5", r"\boxed{1/2}", True),
    ("Convert 63/5 to a mixed number.", r"12\frac{3}{5}", r"\boxed{12\frac35}", True),
    (SIMPLIFY, SIMPLIFY_LABEL, r"\boxed{\sqrt{12}}", False),
    ("Expand $(x+1)^2$.", "x^2+2x+1", r"It is $(x+1)^2$.", False),
    ("Write 12/24 in lowest terms.", "1/2", "12/24", False),
    # what is left to be calculated
    ("How large is it?", r"\frac{\pi}{4}", r"\boxed{0+\int_0^1 \frac{1}{1+x^2} dx}", False),
    ("How large is it?", "e", r"\boxed{\lim_{m\to\infty} (1+1/m)^m}", False),
    ("How large is it?", "x-6", r"\boxed{\begin{vmatrix}1&2\\3&x\end{vmatrix}}", False),
    ("How large is it?", "3", r"\boxed{\max(2, 3)}", False),
    *[
        (SIMPLIFY, SIMPLIFY_LABEL, rf"\boxed{{{copy}}}", False)
        for copy in (
            r"1\cdot(\sqrt{12})",
            r"+\sqrt{12}",
            r"\frac{\sqrt{12}}{1}",
            r"-(-\sqrt{12})",
            r"\sqrt{12}+0",
        )
    ],
    (SIMPLIFY, SIMPLIFY_LABEL, r"\boxed{\sqrt{12} = 2\sqrt{3}}", True),
    (SIMPLIFY, SIMPLIFY_LABEL, r"The answer is $2$. The answer is $2\sqrt{3}$.", False),
    (SIMPLIFY, SIMPLIFY_LABEL, r"\boxed{\frac{2}{2}\sqrt{12}}", False),
    ("Integrate.", r"\int f(x)dx", r"\boxed{\int f(x) dx}", True),
    # letters in both cases
    ("Simplify.", r"\frac{R}{r}", r"\boxed{\frac{r}{R}}", False),
    ("Simplify.", r"\frac{R}{r}", r"\boxed{R r^{-1}}", True),
    ("Simplify.", r"\frac{M}{M+m}", r"\boxed{\frac12}", False),
    ("Simplify.", "X_1", r"\boxed{x_1}", False),
    ("Simplify.", r"\frac{GMm}{r^2}", r"\boxed{GMm/r^2}", True),
    ("Which roots?", "2, 3", r"\boxed{2 < x < 3}", False),
    # equations and lists
    ("Add.", "5", "So $m + n = 5$.", True),
    ("How likely?", r"\frac12", r"\boxed{P(X=2) = \frac12}", True),
    ("Which line?", "2x-5y+7=0", r"\boxed{2x-5y=-7}", True),
    ("How large?", r"\pi", r"\boxed{A = \pi \approx 3.14}", True),
    ("How large?", "3.14", r"\boxed{\pi \approx 3.14}", True),
    ("Which roots?", r"1+\sqrt2, 1-\sqrt2", r"\boxed{1-\sqrt{2} \text{ and } 1+\sqrt{2}}", True),
    ("Which roots?", r"\sqrt{2},\sqrt{2}", r"\boxed{\sqrt{5},\sqrt{2}}", False),
    ("How large?", r"\frac{\ln 2}{2}", r"\boxed{\frac{\log 2}{2}}", True),
    ("Multiply.", "15x^2+24x", r"\boxed{3 x (5 x + 8)}", True),
    ("How many?", r"50\binom{100}{50}", r"\boxed{\binom{100}{50} \cdot 50}", True),
    # a percentage is the number if the question asks for one
    ("What percentage is it?", "28", r"\boxed{28\%}", True),
    # powers and degrees in a sentence
    ("How large is the angle?", r"108^\circ", r"The answer is $108^\circ$.", True),
    ("How many atoms?", "4.5e33", "The answer is $4.5e33$.", True),
    ("How many are there?", "28", r"\boxed{28\%}", False),
    # a phrase before the value in a box
    ("How many?", "5", r"\boxed{\text{The answer is } 5}", True),
    ("How large?", "x < 3", r"\boxed{\text{the final answer is: } x < 3}", True),
    ("How many?", "5", r"\boxed{\text{The answer is not } 5}", False),
    # inequalities and intervals
    ("Where?", "(-3,3)", "The solution is $-3 < x < 3$.", True),
    ("Where?", r"(-\infty,2]", r"\boxed{x \le 2}", True),
    ("Where?", r"(-\infty,2]", r"\boxed{\{x \mid x \le 2\}}", True),
    ("Where?", r"(-\infty,2]", r"\boxed{x < 2}", False),
    ("Where?", r"(-\infty,1)\cup(3,\infty)", r"\boxed{x < 1}", False),
    ("Where?", "[-3,3)", r"\boxed{-3 < x < 3}", False),
    ("Where?", r"(-\infty,1)\cup(3,\infty)", r"\boxed{x < 1 \text{ or } x > 3}", True),
    ("Where?", "x > 3", r"\boxed{x \ge 3}", False),
    ("Where?", "x > 3", r"\boxed{y > 3}", False),
    # brackets that are a factor
    ("How large?", "4", "The answer is $4 (xy + 1)$.", False),
    # units, money, signs
    ("What is 3 - 8?", "-5", "3 - 8 = \u22125", True),
    ("How much is 2 + 3 dollars?", r"\$5", "You pay $5 and not $7.", True),
    # letters at the end are variables, but for a unit that stands apart
    ("Simplify.", "x+5t", r"\boxed{x+5}", False),
    ("Simplify.", "x+5t", r"\boxed{5t+x}", True),
    ("Simplify.", r"\frac{1}{2}c", r"\boxed{\frac{1}{2}}", False),
    ("Simplify.", "12d", "12", False),
    ("How far?", "5 m", r"\boxed{5\text{ km}}", False),
    ("How far?", "5 m", "It is 5 metres.", True),
    ("How far?", "5 m", "It is 500 cm.", False),
    ("How far?", "5 m", r"\boxed{5}", True),
    ("How fast?", "7 km/h", r"\boxed{7}", True),
    ("How fast?", "7 km/h", r"\boxed{7\text{ m/s}}", False),
    ("How far?", "5m", r"\boxed{5}", False),
    ("How large?", r"12\pi", r"\boxed{12\pi\text{ sq. units}}", True),
    ("How large?", r"12\pi\text{ units}^2", r"\boxed{12\pi}", True),
    ("How large?", r"2\sqrt{3}", r"\boxed{2\sqrt{3} ft}", True),
    ("How large?", r"2\sqrt{3}", r"\boxed{2\sqrt{3}\text{ is wrong}}", False),
    ("How large?", r"2\sqrt{3}", r"\boxed{2\sqrt{3}\text{x}}", False),
    # formulas: Math-Verify, with a relative tolerance
    ("Compute.", r"2^{-120}\pi^0", r"\boxed{2^{-119}}", False),
    ("Compute.", r"\frac{1}{2^{40}}", r"\boxed{2^{-40}}", True),
    ("Compute.", r"\sqrt{2}", r"\boxed{1.4142136}", True),
    ("Compute.", r"\sqrt{2}", r"\boxed{1.414}", False),
    ("Compute.", "2+i", r"\boxed{2+\sqrt{-1}}", True),
    ("Differentiate.", "2f'(x)", r"\boxed{f'(x)+f'(x)}", True),
    ("Differentiate.", "2f'(x)", r"\boxed{2f(x)}", False),
    ("Compute.", "x^2+1", r"\boxed{x^2+1=0}", False),
    ("Compute.", "2x-5y+7=0", r"\boxed{5y=2x+7}", True),
    ("Compute.", r"m\frac{dv}{dt}+bv=f", r"\boxed{2m\frac{dv}{dt}+bv=f}", False),
    ("Compute.", r"\frac{100!}{2^{50}}", r"\boxed{\frac{100!}{2^{50}}+1}", False),
    ("Compute.", r"\frac{1}{5}, \frac{1}{3}", r"\boxed{\sqrt{\frac15, \frac13}}", False),
]


# One for each way not to commit to an answer, and the affirmed answers that look like it.
UNCOMMITTED = (
    # taken back behind the box
    r"\boxed{5} is incorrect; I cannot solve it.", r"\boxed{5}. However, this answer is wrong.", r"\boxed{5}? No.",
    r"\boxed{5}. Wait, it is 6.", r"\boxed{5}, just kidding.", r"\boxed{5} 不对。", r"\boxed{5} is a wrong answer.",
    # denied or doubted in its sentence
    r"The answer is not $\boxed{5}$.", r"I do not think that the answer is \boxed{5}.", "I doubt that it is 5.",
    "Everything except 5", "答案不是5", "Maybe 5.", r"It might be \boxed{5}.", r"Any number except \boxed{5}.",
    r"Nobody would say \boxed{5}.", "Die Antwort ist nicht 5.", "答案是5吗", r"Wrong: \boxed{5}", "It exceeds 5.",
    r"\boxed{5} could be it.", r"\boxed{5} is only a placeholder.", "Some claim 5.", r"\boxed{5}" "\n\nI give up.",
    # one of several
    r"\boxed{4} or \boxed{5}", r"\boxed{4} and \boxed{5} are possible.", "The answer is 5 or 6.", "答案是5或6",
    " ".join(f"The answer is {k}." for k in range(1, 6)), "4\n5", r"\boxed{4}" "\n\n" r"\boxed{5}",
    r"The answer is 4. \boxed{5}", r"\boxed{5}. The answer is 6.", "<answer>4</answer><answer>5</answer>",
    "It is 4. It is 5.", "4? 6? 5", "The answer is 4; the answer is also 5.",
    "The answer is 4.[^1]\n\n[^1]: \\boxed{5}",
    # a part of a formula
    r"\boxed{5} \times", r"\boxed{5} + 1", r"2 \cdot \boxed{5}", r"\boxed{5\text{ dozen}}",
    # taken back, in words of many kinds
    r"\boxed{5} -- scrap that.", r"\boxed{5}" "\n\nThat does not check out.",
    r"\boxed{5}. That number is far too high.",
    r"\boxed{5}" "\n\nThe answer above should be ignored.", r"\boxed{5}" "\n\nI made an error above.",
    "The answer is 5, so no.", r"\boxed{5} only when none is lost.", "答えは5ではありません。",
    r"There is no reason to believe it is \boxed{5}.", "In no way is it 5.", "Far from 5.",
    r"Hardly \boxed{5}.",
    "Were it so, it would be 5.", "If it were more, it would be 5.",
    # hidden
    "It is n\u200bot 5.", "It is n\u043et 5.", r"<del>\boxed{5}</del>", "<s>The answer is 5.",
    "[//]: # (The answer is 5)",
    "A pupil wrote 'the answer is 5'.", "\u00abThe answer is 5\u00bb, says the book.",
    # said by another one, or in a condition
    'The task says "write \\boxed{5}".', "% \\boxed{5}\nThe answer is 6.", "<!-- \\boxed{5} -->",
    "Unless it is 5, no.",
    r"Suppose the answer is \boxed{5}.",
    # false
    "\\boxed{5}\n\nI disagree with this.", r"\boxed{6 = 5}", r"\boxed{5 = 5}", r"\boxed{5\%}",
    r"\boxed{500\%}",
    # in a sentence that is not read
    r"Vastaus ei ole \boxed{5}.", r"Forse la risposta è \boxed{5}.", r"Cevap \boxed{5} değildir.",
    "答えはたぶん5です。", "\\boxed{5}\n\nDas stimmt leider so nicht.",
    "\\boxed{5}\n\nЭ\u0442\u043e \u043d\u0435 \u0442\u0430\u043a.",
    "\\boxed{5}\n\n更正\uff1a应为6。", r"\boxed{5} 👎",
    r"The answer is conceivably \boxed{5}.", r"I rolled a die and it showed \boxed{5}.", "My friend got 5.",
    # inside a command or a formula
    r"\textcolor{white}{\boxed{5}}", r"\newcommand{\ans}{\boxed{5}} It is six.", r"\verb|\boxed{5}|",
    r"6\footnote{or \boxed{5}}", r"4 < \boxed{5} < 8", r"\boxed{5} = 6", r"x \stackrel{?}{=} \boxed{5}",
    r"\boxed{5, \ldots}", r"\boxed{5 \text{ (unsure)}}", r"\boxed{5}\ldots", "```python\n# 5\n```",
    '<span style="display:none">\\boxed{5}</span>', "> The answer is 5.", '{"answer": 5, "correct": false}',
    # another value stands in another box or behind
    "First, 7 + 4 = \\boxed{11}.\n\nThen we subtract 6 and find \\boxed{5}.",
    "\\boxed{5}\n\nTherefore the total is 6.", r"\boxed{5}. So there are six of them.", r"\boxed{5}. Make that 6.",
    "\\boxed{5}\n\nRecounting gives 6.", "5\n\nP.S. It is 6.", r"\boxed{5}, otherwise 6", "A: 5\nB: 6",
    # a line above governs it, or the response does not end
    "### Wrong answers\n\n\\boxed{5}", "Common mistakes:\n\\boxed{5}", "**Random guesses**\n\n\\boxed{5}",
    "# \u9519\u8bef\u7b54\u6848\n5", r"\boxed{5} dozen", r"\boxed{5}\text{ dozen}", "The answer is 5.\n\n6", "4? 6?\n5",
    r"\boxed{\text{The wrong answer is } 5}", r"\boxed{5}. I get 6. I got 5 before.", r"\boxed{5} turns out wrong",
    "The answer is not:\n\n\\boxed{5}", "# Rejected\n5",
    "So the answer is 5 plus", "7 + 4 = 11, so we start from 5 and then we",
    # "answer" stands for something else
    "Twice the answer is 5.", r"The answer has \boxed{5} digits.", "The answer to the next question is 5.",
    "For most people the answer is 5.", r"The answer isnt \boxed{5}.", r"The answer is one more than \boxed{5}.",
    r"We rule out \boxed{5}.", r"\boxed{5}, which is absurd.", "\\boxed{5}\n\nSomething is off here.",
    "\\boxed{5}\n\nLet us start over.", "\\boxed{5}\n\nPlease do not grade this.",
    # an unfinished thought
    r"<think>So it is \boxed{5}.", "<think>a</think>b<think>The answer is 5.", "[THINK]5",
    r"<|channel|>analysis<|message|>\boxed{5}",
)  # fmt: skip
COMMITTED = (
    # other languages in known words, and Chinese
    "Ответ: 5", "La réponse est $\\boxed{5}$.", "答えは\\boxed{5}です。",
    "정답은 5입니다.", "所以满足条件的非负整数共有\\boxed{5}个。",
    "故答案为\\boxed{5}。", "**答案\uff1a5**",
    # names and verbs that no table has, and values with units behind an equation
    r"Sally threw $\boxed{5}$ balls.", r"There are $\boxed{5}$ teachers at Dr. Wertz's school.",
    "He drove 20 + 30 = 50 minutes.\nThus, he needs 50 / 10 = 5 minutes for each mile.",
    r"Therefore, the value is \(\boxed{5}\).", "Thus, the answer is:\n\n$$\n\\boxed{5}\n$$",
    "### Final Answer\n\n$$\\boxed{5}$$", "**Answer**\n\n\\boxed{5}", "Since the sum is not zero, we get:\n\\boxed{5}",
    "11\n- 6\n= 5\nThe answer is 5.", r"\boxed{5 \text{ erg/s}}", r"Since $n < 7$, the answer is $x = \boxed{5}$.",
    "The final answer is: $\\boxed{5}$. I hope it is correct.", r"\boxed{5}. This completes the solution.",
    "\\boxed{5}\n\nExplanation: 7 + 4 = 11 and 11 - 6 = 5.",
    r"The number of non-negative integers is \boxed{5}.", "If she adds them, she would make \\boxed{5}.",
    "It holds only if x = 5. So the answer is 5.", "There is no rest, so it is 5.",
    "It's Janet's day. The answer is 5.",
    "The answer is 5[^1].\n\n[^1]: 7 + 4 - 6 = 5",
    r"\boxed{5}" "\n\nI hope that helps, and that does check out.",
    'She says "Add them." The answer is 5. "Great."',
    "Can it be 4? No. It is 5.", "Let's count: 4, 5. So 5 eggs.", r"She makes $\boxed{\$5}$ every day.",
    "She makes 5 * 1 = <<5*1=5>>5 a day.\n#### 5", "$$\n4 + 1 = 5.\n$$", r"\boxed{5 \text{ eggs per day}}",
    "答案是5个。",
    r"The answer is \boxed{5}, because 7 + 4 is 11, not 12.", "The answer isn't 6, it's 5.", "Not 6 but 5.",
    r"Since n cannot be 0, we obtain $\boxed{5}$.",
    r"The number of integers that are not prime is \boxed{5}.",
    r"If we simplify, then we get \boxed{5}.", r"So she must score at least \boxed{5} points.",
    r"It is $10/2$ or $\boxed{5}$.", r"There is no doubt that it is \boxed{5}.",
    r"We may conclude that there are \boxed{5}.",
    r"\boxed{4} is wrong. The correct answer is \boxed{5}.", "The answer is 4. No, sorry, the answer is 5.",
    r"\boxed{5}" "\n\nWould you like more?",
    "<think>4? no, \\boxed{6}</think>\n\nThe answer is 5.", "4 or 5?</think>\\boxed{5}", "因此答案是\\boxed{5}。",
    "<|channel|>analysis<|message|>4?<|end|><|start|>assistant<|channel|>final<|message|>5", "Is it 4? No. It is 5.",
)  # fmt: skip


@pytest.mark.parametrize("response", UNCOMMITTED)
def test_a_response_that_does_not_commit_to_the_answer_earns_nothing(reward, response):
    assert reward(response, "5", SUM) == 0.0


@pytest.mark.parametrize("response", COMMITTED)
def test_a_response_that_affirms_the_answer_earns_it(reward, response):
    assert reward(response, "5", SUM) == 1.0


# Two answers of each kind that may be offered, and what looks like them.
TWO_ANSWERS = (
    # side by side
    "4; 5", "Answer: 5 | 6", "The answer is 5 and also 6.", "The answer is 5 (also 6).", "Die Antwort ist 5 und 6.",
    "\u7b54\u6848\u662f5\u548c6\u3002", r"\boxed{5}, 6", r"6 and \boxed{5}",
    # in sentences that follow each other
    "First 4. Then 5.", "It is 6. The answer is 5.", "So the result is 6. The answer is 5.", "x = 4. x = 5.",
    "One is 4. The other is 5.", "The sum is 4. The sum is 5.", "4. 5.", "We get 4. We get 5.", "$x=4$. $x=5$.",
    "4 is one. 5 is another.",
    "The final result is 6. We add. The answer is 5.",
    # another mark
    "\\boxed{5}\n\n**6**", "**Answer: 6**\n\n\\boxed{5}", "\\boxed{5}\n5 and also 6", "\\boxed{5}\nThe answer is 5; 6.",
    "\\boxed{5}\n\nThe answer is 5, or alternatively 6.",
    # a later sentence offers both, or another one as well
    "The answer is 5. Both 5 and 6 work.", r"\boxed{5}. So the answers are 5 and 6.", r"\boxed{5}. 6 is also right.",
    # no correction between them, though the second sentence has a "not"
    "The answer is 6. " + "We add the numbers that are given, in their order. " * 3 + "Two is not odd. "
    + "So we go on and subtract the last number from the sum of the others, step by step as before. "
    + "Then we count what is left of them. The answer is 5.",
)  # fmt: skip
ONE_ANSWER = (
    "\\boxed{5}\n\nThe answer is 5, not 6.", "5 (not 6)", "x = 11 - 6; x = 5", "So x = 4. The answer is 5.",
    "x = 4, y = 5",
    "The sum is 11. The answer is 5.", "Sum: 11\nAnswer: 5", "We get 11. We subtract 6. We get 5.",
    "7 + 4 = 11; 11 - 6 = 5",
    "The answer is 6. 6 + 6 is 12, so that cannot be. The answer is 5.", "**Answer:** \\boxed{5}",
    "\\boxed{5}\n\n**5**",
    "| step | value |\n|---|---|\n| sum | 11 |\n\n\\boxed{5}", r"\boxed{5}. Both 7 and 4 are used.",
    "The candidates are 4 and 5. 4 is even. So the answer is 5.",
)  # fmt: skip


@pytest.mark.parametrize("response", TWO_ANSWERS)
def test_two_offered_answers_are_none(reward, response):
    assert reward(response, "5", SUM) == 0.0


@pytest.mark.parametrize("response", ONE_ANSWER)
def test_another_number_that_is_not_offered_costs_nothing(reward, response):
    assert reward(response, "5", SUM) == 1.0


@pytest.mark.parametrize(
    ("label", "right", "wrong"),
    [("x<1 or x>3", r"\boxed{x>3 \lor x<1}", r"\boxed{x<1 \text{ and } x>3}"),
     ("x<1 or x>3", "x<1, or x>3", "x<1, and x>3"),
     ("x>1 and x<3", r"\boxed{x<3 \text{ and } x>1}", r"\boxed{x>1 \text{ or } x<3}"),
     (r"(-\infty,1)\cup(3,\infty)", r"\boxed{x<1 \text{ or } x>3}", r"\boxed{x<1 \text{ and } x>3}"),
     ("x=3,y=-2", r"\boxed{y=-2, x=3}", r"\boxed{x=3, x=-2}"),
     ("x=3,y=-2", r"\boxed{(3,-2)}", r"\boxed{x=-2, y=3}"),
     ("3, -2", r"\boxed{x=-2 \text{ or } x=3}", r"\boxed{x=-2 \text{ or } x=2}")],
)  # fmt: skip
def test_what_joins_relations_and_whose_values_they_are_counts(reward, label, right, wrong):
    assert reward(right, label, "Solve it.") == 1.0
    assert reward(wrong, label, "Solve it.") == 0.0


# Right answers of three kinds in each language; then a denial, a doubt, a choice and a question.
LANGUAGES = {
    "spanish": (
        (r"Por lo tanto, la respuesta es \boxed{5}.", r"Quedan \boxed{5} huevos.", "**Respuesta: 5**"),
        (r"La respuesta no es \boxed{5}.", r"Quizás quedan \boxed{5} huevos.", r"La respuesta es 4 o \boxed{5}.",
         r"¿Son \boxed{5} huevos?", r"La respuesta es 4. La respuesta es \boxed{5}."),
    ),
    "french": (
        (r"La réponse est donc \boxed{5}.", r"Donc il reste \boxed{5} oeufs.", "Réponse : 5"),
        (r"La réponse n'est pas \boxed{5}.", r"Il reste peut-être \boxed{5} oeufs.", r"Il reste 4 ou \boxed{5} oeufs.",
         r"Est-ce que c'est \boxed{5}", r"Il reste au moins \boxed{5} oeufs."),
    ),
    "german": (
        (r"Also bleiben \boxed{5} Eier übrig.", "Die Antwort ist 5.", r"Die Lösung lautet: \boxed{5}"),
        (r"Ich glaube nicht, dass die Antwort \boxed{5} ist.", r"Vielleicht sind es \boxed{5}.",
         r"Es bleiben 4 oder \boxed{5} Eier.", r"Sind es \boxed{5}?", r"Wenn alle ganz sind, bleiben \boxed{5}."),
    ),
    "russian": (
        (r"Значит, осталось \boxed{5} яиц.", r"Ответ: \boxed{5}.", "Таким образом, сумма равна 5."),
        (r"Ответ не \boxed{5}.", r"Возможно, осталось \boxed{5} яиц.", r"Осталось 4 или \boxed{5} яиц.",
         r"Осталось ли \boxed{5} яиц?", r"Больше \boxed{5}."),
    ),
    "portuguese": (
        (r"Portanto, a resposta é \boxed{5}.", r"Restam \boxed{5} ovos.", "Resposta: 5"),
        (r"A resposta não é \boxed{5}.", r"Talvez restem \boxed{5} ovos.", r"Restam 4 ou \boxed{5} ovos.",
         r"A resposta é \boxed{5}?"),
    ),
    "italian": (
        (r"Quindi la risposta è \boxed{5}.", r"Ne restano \boxed{5}.", "Rimangono 5 uova."),
        (r"La risposta non è \boxed{5}.", r"Forse la risposta è \boxed{5}.", r"Rimangono 4 oppure \boxed{5} uova.",
         r"La risposta è \boxed{5}?"),
    ),
    "japanese": (
        ("答えは5です。", r"したがって、残りの卵は\boxed{5}個です。", r"以上より、求める値は\boxed{5}です。"),
        ("答えは5ではない。", r"答えは\boxed{5}かもしれない。", r"答えは4または\boxed{5}です。",
         r"答えは\boxed{5}ですか。"),
    ),
    "korean": (
        (r"따라서 정답은 \boxed{5}입니다.", "남은 달걀은 5개입니다.", "답: 5"),
        (r"정답은 \boxed{5}가 아닙니다.", r"아마 정답은 \boxed{5}입니다.", r"정답은 4 또는 \boxed{5}입니다.",
         r"정답은 \boxed{5}일까요"),
    ),
    "vietnamese": (
        (r"Vậy đáp án là \boxed{5}.", "Vậy còn lại 5 quả trứng.", r"Kết quả là $\boxed{5}$."),
        (r"Đáp án không phải là \boxed{5}.", r"Có lẽ đáp án là \boxed{5}.", r"Đáp án là 4 hoặc \boxed{5}.",
         r"Đáp án có phải là \boxed{5} không?"),
    ),
    "arabic": (
        (r"إذن، الجواب هو \boxed{5}.", "الإجابة: 5", r"بقيت \boxed{5} بيضات."),
        (r"الجواب ليس \boxed{5}.", r"ربما الجواب هو \boxed{5}.",
         r"الجواب هو 4 أو \boxed{5}.", "هل الجواب هو \\boxed{5}\u061f"),
    ),
    "hindi": (
        (r"अतः उत्तर \boxed{5} है।", "इसलिए, 5 अंडे बचे हैं।", r"x का मान \boxed{5} है।"),
        (r"उत्तर \boxed{5} नहीं है।", r"शायद उत्तर \boxed{5} है।", r"उत्तर 4 या \boxed{5} है।", r"क्या उत्तर \boxed{5} है?"),
    ),
    "chinese": (
        ("因此答案是\\boxed{5}。", "一共有5个。", "所以剩下\\boxed{5}个鸡蛋。"),
        ("答案不是\\boxed{5}。", "也许是\\boxed{5}。", "答案是4或\\boxed{5}。", "答案是\\boxed{5}吗?"),
    ),
    "unknown": (
        (r"Vastaus: \boxed{5}", r"Απάντηση: \boxed{5}", "Svar: 5"),
        (r"Vastaus ei ole \boxed{5}.", r"Δεν είναι \boxed{5}", r"Svaret är kanske \boxed{5}.",
         r"Ef ég veit rétt er það \boxed{5}."),
    ),
}  # fmt: skip
EXPLAINED = (  # an explanation behind the box that takes nothing back
    "\\boxed{5}.\n\nAlternatively, we have\n\\[7 - 2 = 5.\\]",

    r"\boxed{5}. Thus our solution works.",
    r"\boxed{5}. Note that the conditions hold when $(a,b,c,d)=(1,3,3,9)$.", r"$$\boxed{5}$$" "\n\nfeet.",
    r"\boxed{5}. Will this always happen?",
    r"$\boxed{5}$ (or else $J$ would have more factors).", r"\boxed{5}. It works, so it is not an extraneous solution.",
)  # fmt: skip


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_sentence_of_another_language_commits_unless_it_denies_doubts_or_asks(reward, language):
    right, wrong = LANGUAGES[language]
    assert [response for response in right if reward(response, "5", SUM) != 1.0] == []
    assert [response for response in wrong if reward(response, "5", SUM) != 0.0] == []


@pytest.mark.parametrize("response", EXPLAINED)
def test_an_explanation_behind_the_answer_takes_nothing_back(reward, response):
    assert reward(response, "5", SUM) == 1.0


@pytest.mark.parametrize(
    ("response", "right"),
    [("The answer is B. The answer is D.", False), (r"\boxed{B} is wrong.", False), ("Maybe B", False), ("B?", False),
     ("<think>B", False), ("答案不是B", False), ("The answer is A. No, sorry, the answer is B.", True),
     ("The answer is B, because A is wrong.", True), ("The answer is B, though C also fits.", False),
     ("I eliminate (B).", False), ("(B) is wrong", False), ("答案\uff1aB", True),
     ("B. Paris", True), ("B. 42", True), ("A. 3 B. 4", False), ("本题选B。", True)],
)  # fmt: skip
def test_a_letter_is_committed_to_as_a_number_is(reward, response, right):
    assert reward(response, "B", "Which one?") == float(right)


def test_a_thought_that_the_prompt_opens_is_unfinished_until_it_is_closed(module):
    opened = SUM + "\n<think>\n"
    closed = SUM + "\n<think>\n\n</think>\n\n"
    rows = [
        (opened, r"so \boxed{5}", 0.0),
        (opened, r"4?</think>\boxed{5}", 1.0),
        (closed, r"\boxed{5}", 1.0),
    ]
    queries = [prompt + response for prompt, response, _ in rows]
    result = module.reward_func(queries, [prompt for prompt, *_ in rows], ["5"] * len(rows))
    assert result["rewards"] == [reward for *_, reward in rows]
    assert result["read"][0] == "no answer: the thought does not end"


@pytest.mark.parametrize(("question", "label", "response", "right"), TABLE)
def test_the_verdict_is_that_of_a_person(reward, question, label, response, right):
    assert reward(response, label, question) == float(right)


def test_labels_that_cannot_be_read_and_columns_of_other_lengths_are_errors(module, reward):
    with pytest.raises(ValueError, match=r"cannot read the label .*\?\?\?.*not one number"):
        reward("5", "???")
    with pytest.raises(ValueError, match=r"--data\.label_key"):
        reward("5", " ")
    with pytest.raises(ValueError, match="shorter"):
        module.reward_func(["a=1"], ["a="], [])


NOT_DONE = "no answer: {} is left to be calculated, or the question's own"


@pytest.mark.parametrize(
    ("question", "label", "response", "read"),
    [
        ("Compute.", "2.5", r"So \boxed{2\frac12}.", r"\frac{5}{2}"),
        ("Compute.", "x+2", r"\boxed{x+1}", "x+1"),
        (SIMPLIFY, r"2\sqrt{3}", r"\boxed{\sqrt{12}}", NOT_DONE.format(r"\sqrt{12}")),
        ("", "e", r"\boxed{\lim_{m\to\infty} m}", NOT_DONE.format(r"\lim_{m\to\infty}m")),
        ("Compute.", "5", "It is not 5.", "no answer of the label's kind in a box, after 'answer is' or at the end"),
    ],
)  # fmt: skip
def test_what_was_read_stands_beside_the_reward(module, question, label, response, read):
    assert module.reward_func([question + response], [question], [label])["read"] == [read]


def test_a_response_that_never_ends_is_wrong_and_a_verifier_that_is_broken_is_missing(
    module, reward, monkeypatch
):
    pool = VerifierPool(size=1, time_limit_s=2.0)
    monkeypatch.setattr(module, "_pool", pool)
    assert reward(r"\boxed{9^{9^{9^9}}}", r"\sqrt{2}") == 0.0
    # It cannot verify the label either
    assert reward(r"\boxed{9^{9^{9^9}}}", r"9^{9^{9^8}}") is None
    pool.close()
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert reward(r"\boxed{\sqrt{3}}", r"\sqrt{2}") is None
    assert reward(r"\boxed{5}", "5") == 1.0
    monkeypatch.setattr(module.answers, "find", None)  # a fault of this package
    broken = module.reward_func([r"?\boxed{5}"], ["?"], ["5"])
    assert broken["rewards"] == broken["read"] == [None]


def test_eight_threads_get_their_own_verdicts(reward):
    cases = [(rf"\boxed{{\frac{{{n}}}{{7}}}}", f"{n % 5}/7") for n in range(80)]
    with ThreadPoolExecutor(8) as threads:
        rewards = list(threads.map(lambda case: reward(*case), cases))
    # n/7 equals (n mod 5)/7 for n = 0..4 only.
    assert rewards == [1.0] * 5 + [0.0] * 75


def test_labels_that_their_own_text_does_not_earn_are_found_before_a_training(module, monkeypatch):
    prose = "There are $12$ ways for $n=3$."
    torn = r"t(0,4]"
    labels = [
        "5",
        r"\frac{1}{2}",
        prose,
        r"\{1,2\}",
        "(0,1]",
        prose,
        "50\u00b0",
        "5.",
        torn,
        r"\text{yes}",
    ]
    labels += ["9 (apples)", r"$\boxed{12}$", r"The answer is \boxed{x+1}."]
    assert list(module.unreadable_labels(labels)) == [prose, torn]
    # A copy
    assert list(module.unreadable_labels(["2/4", "x+1"], ["What is 2/4?", "Repeat x+1."])) == [
        "2/4"
    ]
    monkeypatch.setattr(module._pool, "ask", lambda request: pytest.fail(f"asked {request}"))
    assert module.unreadable_labels(map(str, range(10_000))) == {}  # numbers need no Math-Verify


def test_labels_that_only_a_box_earns_are_named(module):
    assert module.boxes_needed(["5", r"\sqrt{2}", "x^2+1", r"\boxed{7}"]) == []
    [warning] = module.boxes_needed(["MR=SRMC", "x=1,\ny=2"])
    assert warning.startswith("1 of 2 labels, such as 'x=1,\\ny=2', are earned only in a box")
