"""A model whose files change during a run, as a branch of a hub does, so that a site works with several of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from cloister.clients.ranks.resident import Resident
from cloister.clients.site import Site
from cloister.lm.model.model import from_config
from cloister.lm.tasks.auto import CAUSAL
from cloister.lm.text.tokenizer import byte_tokenizer
from cloister.protocol.errors import ModelError, StaleError
from cloister.protocol.messages.messages import NOTHING_CARRIED, TRAIN
from cloister.tests.parties.federation import Federation, tiny
from cloister.tests.tools.raises import raises

pytestmark = pytest.mark.usefixtures("one_thread")


class Moving:
    """A site whose model can be changed.

    Args:
        folder: An empty folder.
        settings: Of the plan.
    """

    def __init__(self, folder: Path, *settings: str) -> None:
        self.files = folder / "base"
        made = AutoConfig.for_model(
            "llama",
            vocab_size=264,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
        from_config(made, CAUSAL).save_pretrained(self.files)
        byte_tokenizer().save_pretrained(self.files)
        model = [f"model.name={self.files}", "model.config={}", "model.tokenizer=auto"]
        scheme = "model.adapter.scheme=ffa-lora"
        clear = "aggregation.secure=false"
        self.federation = Federation(folder / "sites", tiny(*model, scheme, clear, *settings))
        self.federation.joined(resident=Resident())

    def site(self) -> Site:
        """The site, in a process that has loaded nothing."""
        return self.federation.site(resident=Resident())

    def move(self) -> None:
        """Other weights of the frozen base."""
        file = self.files / "model.safetensors"
        weights = load_file(file)
        weights["lm_head.weight"].zero_()
        save_file(weights, file, {"format": "pt"})


def test_an_update_that_was_kept_belongs_to_the_model_that_it_was_made_with(tmp_path: Path) -> None:
    """Otherwise it could be masked and summed with updates that others make with the new one, which are known."""
    moving = Moving(tmp_path)
    request = moving.federation.request()
    sent = moving.site().contribute(request)
    assert moving.site().contribute(request).manifest == sent.manifest
    moving.move()
    with raises(StaleError, "update of round 1", says="'model'"):
        moving.site().contribute(request)


def test_what_a_site_carries_belongs_to_the_model_that_it_was_made_with(tmp_path: Path) -> None:
    moving = Moving(tmp_path, "local.optimizer_state=keep")
    moving.site().contribute(moving.federation.request())

    def history() -> bytes:
        site, about = moving.site(), moving.federation.sum_id(purpose=TRAIN, number=2)
        return site._history(site._open(about), about)

    assert history() != NOTHING_CARRIED
    moving.move()
    assert history() == NOTHING_CARRIED


# PEFT asks transformers for a property by its old name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_a_model_with_an_adapter_of_its_own_is_refused(tmp_path: Path) -> None:
    """transformers would load it beside the plan's adapter, and its scale is in no parameter."""
    moving = Moving(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(moving.files)
    get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(str(moving.files))
    with raises(ModelError, "model.name", says="adapter_config"):
        moving.site().contribute(moving.federation.request())


def test_prepared_records_belong_to_the_tokenizer_that_they_were_made_with(tmp_path: Path) -> None:
    """Otherwise a site would train on other tokens than its tokenizer gives, whose digest it has signed."""
    moving = Moving(tmp_path)
    moving.site().contribute(moving.federation.request())

    def prepared() -> set[Path]:
        return set(moving.federation.sites_folder.rglob("tokens-*"))

    before = prepared()
    settings = moving.files / "tokenizer_config.json"
    settings.write_text(settings.read_text().rstrip()[:-1] + ', "split_special_tokens": true}')
    with pytest.raises(StaleError):
        moving.site().contribute(moving.federation.request(number=1))
    moving.site().contribute(moving.federation.request(number=2))
    assert prepared() > before
