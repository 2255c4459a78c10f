# Everything happens in an environment of its own: Python and make are all that a machine needs.
#
#   make demo      watch a sweep being killed, stopped and damaged, and finish all the same
#   make test      run every test but those of `make proofs`
#   make test-without-slurm  those of the launchers and commands, as on a machine without Slurm
#   make proofs    what takes minutes, or proves what others' tools do (hours; tests/proofs/README.md)
#   make check     format, lint, types, import rules
#   make coverage  lines and branches of forge that the tests run, in subprocesses too
#   make docs      build the documentation, and list its pages; warnings are errors
#   make policy    write the preset `default` and the tables of its reference from the schema
#   make bench     start-up, save and launch times of this machine
#   make slurm-install  Slurm from Debian's or Ubuntu's packages (root): for tests
#   make slurm-shell    a shell on a throwaway cluster of two nodes, on loopback
#   make clean     remove the environment and everything that was built

PYTHON ?= python3
VENV ?= .venv
# Many tests wait, for processes or for Slurm (two at most, a cluster each): so many keep it busy, at
# 0.3 GB each.
JOBS ?= $(shell expr 2 \* $$(getconf _NPROCESSORS_ONLN) + 4)

IN_VENV := $(VENV)/bin/python
PYTEST := $(IN_VENV) -m pytest

# What a shell exports for other environments must not reach into this one.
unexport PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE VIRTUAL_ENV
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo picture test test-without-slurm proofs check coverage bench docs policy format clean slurm-install slurm-shell
.DELETE_ON_ERROR:

help:
	@sed -n '/^#   make/s/^#   //p' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.demo-installed
	$(IN_VENV) examples/demo.py

# The picture of README.md and the site: the demo's.
picture: $(VENV)/.demo-installed
	$(IN_VENV) examples/demo.py --picture docs/_static/demo.png

IN_PARALLEL := -n $(JOBS) --maxprocesses 10 --dist loadscope

test: $(VENV)/.dev-installed $(VENV)/.frameworks-installed $(VENV)/.lightning-installed
	$(PYTEST) $(IN_PARALLEL) -m 'not proofs'

# Programs of Slurm and munge; Debian adds -wlm to the daemons' names.
OF_SLURM := sacct* salloc sattach sbatch sbcast scancel scontrol scrontab sdiag sinfo sprio squeue \
  sreport srun sshare sstat strigger slurm* munge* remunge unmunge
WITHOUT_SLURM := $(CURDIR)/build/without-slurm

# PATH is one folder, with links to all programs of PATH but these; tests on a cluster are left out.
test-without-slurm: $(VENV)/.dev-installed $(VENV)/.frameworks-installed $(VENV)/.lightning-installed
	rm -rf $(WITHOUT_SLURM) && mkdir -p $(WITHOUT_SLURM)
	for folder in $$(echo "$$PATH" | tr : ' '); do ln -s "$$folder"/* $(WITHOUT_SLURM) 2> /dev/null || true; done
	cd $(WITHOUT_SLURM) && rm -f $(OF_SLURM)
	PATH=$(WITHOUT_SLURM) $(PYTEST) $(IN_PARALLEL) -m 'not proofs and not slurm' tests/cli tests/launch tests/packaging

# Each by itself, AT_ONCE of them at a time, whatever the others end with; the longest first. The
# second one is `make test` with all of torch, on the disk.
AT_ONCE ?= 2
PROOF := $(IN_VENV) tests/proofs
torture = $(PROOF)/torture/all_points.py
suite = env FORGE_TESTS_QUICK=no $(PYTEST) $(IN_PARALLEL) -m 'not proofs'
chaos = $(PROOF)/chaos.py 200 --seed 1
rehearse = $(PROOF)/rehearse_all.py
sweeps = $(PROOF)/chaos_sweeps.py 40 --seed 1
marked = $(PYTEST) $(IN_PARALLEL) -m proofs
tests = env FORGE_REQUIRE_HYDRAS=1 $(PYTEST) $(IN_PARALLEL) tests/proofs
ranks = $(PROOF)/chaos_ranks.py 50 --seed 1 --ranks 4
shards = $(PROOF)/chaos_ranks.py 50 --seed 1 --ranks 4 --wrap fsdp2
commands = $(PROOF)/any_command.py
frameworks = $(PROOF)/frameworks.py --times 20 --seed 1
huggingface = $(PROOF)/huggingface.py --seed 1
lightning = $(PROOF)/chaos_lightning.py --seed 1
lightning_oldest = env FORGE_TESTS_LIGHTNING=lightning_oldest $(PYTEST) tests/compat/test_of_lightning.py tests/integrations/test_lightning.py
page = tests/integrations/test_transformers.py::test_the_script_of_the_page
frameworks_oldest = env FORGE_TESTS_FRAMEWORKS=frameworks_oldest $(PYTEST) tests/compat/test_of_transformers.py \
  tests/compat/test_of_accelerate.py tests/integrations/test_transformers.py tests/integrations/test_accelerate.py --deselect $(page)
lost_jobs = $(PROOF)/lost_jobs.py
early_signals = $(PROOF)/early_signals.py 50
own_scripts = $(PROOF)/own_scripts.py
showcase = $(PROOF)/showcase.py
earlier = $(PROOF)/earlier_version.py
hangs = $(PROOF)/planted_hangs.py
causes = $(PROOF)/planted_causes.py
times = $(PROOF)/time_of_jobs.py 50 --seed 1
resumed = $(PROOF)/resumed_sweeps.py
watched = $(PROOF)/watched_sweep.py
attacks = $(PROOF)/all_attacks.py
sick = $(PROOF)/sick_machine.py
pages = $(MAKE) docs
PROOFS := torture suite chaos rehearse sweeps tests marked ranks shards commands frameworks huggingface lightning lightning_oldest frameworks_oldest lost_jobs early_signals own_scripts showcase earlier hangs causes times resumed watched attacks sick pages

proofs: $(VENV)/.dev-installed $(VENV)/.demo-installed $(VENV)/.docs-installed $(VENV)/.hydras-installed \
  $(VENV)/.lightning-installed $(VENV)/.lightning_oldest-installed $(VENV)/.frameworks_oldest-installed \
  $(VENV)/.loggers-installed $(VENV)/.optuna-installed $(VENV)/.trl-installed
	@rm -rf build/proofs && mkdir -p build/proofs
	@$(MAKE) --no-print-directory --keep-going --jobs $(AT_ONCE) $(PROOFS:%=proof-%)

.PHONY: $(PROOFS:%=proof-%)
$(PROOFS:%=proof-%): proof-%:
	@began=$$(date +%s); $($*) > build/proofs/$*.txt 2>&1; code=$$?; \
	{ echo "== $*: exit code $$code after $$(($$(date +%s) - began)) s"; tail -n 4 build/proofs/$*.txt; }; exit $$code

check: $(VENV)/.dev-installed
	$(IN_VENV) -m ruff format --check .
	$(IN_VENV) -m ruff check .
	$(IN_VENV) -m mypy
	$(IN_VENV) tests/support/plain_words.py
	$(IN_VENV) tests/proofs/planted.py --list
	$(PYTEST) -q tests/packaging/test_imports.py

# Each process writes a file of its own below .coverage-data; they are combined at the end.
coverage: $(VENV)/.dev-installed $(VENV)/.frameworks-installed $(VENV)/.lightning-installed
	rm -rf .coverage-data && mkdir .coverage-data
	COVERAGE_FILE='$(CURDIR)/.coverage-data/data' $(IN_VENV) -m coverage run -m pytest \
	  $(IN_PARALLEL) -m 'not proofs' --timeout 900
	COVERAGE_FILE='$(CURDIR)/.coverage-data/data' $(IN_VENV) -m coverage combine --quiet
	COVERAGE_FILE='$(CURDIR)/.coverage-data/data' $(IN_VENV) -m coverage report --show-missing

bench: $(VENV)/.dev-installed
	$(IN_VENV) benchmarks/startup.py
	$(IN_VENV) benchmarks/checkpoint.py
	$(IN_VENV) benchmarks/launch.py
	$(IN_VENV) benchmarks/slurm_launch.py

docs: $(VENV)/.docs-installed
	rm -rf build/docs
	$(IN_VENV) -m sphinx --fail-on-warning --keep-going -q docs build/docs
	@cd build/docs && find . -name '*.html' -not -path './_static/*' | sort

policy: $(VENV)/.dev-installed
	$(IN_VENV) docs/_ext/policy_pages.py

format: $(VENV)/.dev-installed
	$(IN_VENV) -m ruff format .
	$(IN_VENV) -m ruff check --fix .

slurm-install:
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge

slurm-shell: $(VENV)/.dev-installed
	$(IN_VENV) tests/support/cluster.py

clean:
	rm -rf $(VENV) build dist *.egg-info .coverage-data .mypy_cache .pytest_cache .ruff_cache

# Stamps: a second call installs nothing, a changed pyproject.toml or constraints.txt does.
$(VENV)/.%-installed: pyproject.toml constraints.txt | $(VENV)/.created
	@echo "Installing forge and what it needs into $(VENV): once, some minutes"
	@$(IN_VENV) -m pip install -qq --constraint constraints.txt --editable '.[$*]'
	@touch $@

# Other versions of Hydra, for the suites that it has for launchers; the candidate where it can be had.
$(VENV)/.hydras-installed: $(VENV)/.dev-installed
	@rm -rf $(VENV)/hydras
	@$(IN_VENV) -m pip install -qq --no-deps --target $(VENV)/hydras/1.3.2 hydra-core==1.3.2
	@$(IN_VENV) -m pip install -qq --no-deps --target $(VENV)/hydras/1.4.0rc3 \
	  hydra-core==1.4.0rc3 omegaconf==2.4.1rc1 hydra-submitit-launcher==1.4.0rc3 || rm -rf $(VENV)/hydras/1.4.0rc3
	@touch $@

# Lightning, for the tests of integrations, and for what README.md says of it.
$(VENV)/.lightning-installed: $(VENV)/.dev-installed
	@$(IN_VENV) -m pip install -qq --no-deps --target $(VENV)/lightning/site-packages lightning==2.6.6 \
	  pytorch-lightning==2.6.6 lightning-utilities==0.15.3 torchmetrics==1.9.0 tqdm==4.70.1 \
	  jsonargparse==4.53.0 docstring-parser==0.18.0 typeshed-client==2.15.0
	@touch $@

# The oldest release that `forge.integrations.lightning` supports.
$(VENV)/.lightning_oldest-installed: $(VENV)/.dev-installed
	@$(IN_VENV) -m pip install -qq --no-deps --target $(VENV)/lightning_oldest/site-packages \
	  lightning==2.5.0 pytorch-lightning==2.5.0 lightning-utilities==0.11.9 torchmetrics==1.6.0 tqdm==4.70.1
	@touch $@

# What many loops are written with: for the tests of integrations, and for proofs. torch and numpy are
# those of the environment. Half a minute. (Libraries look for `site-packages` in their own paths.)
$(VENV)/.frameworks-installed: $(VENV)/.dev-installed
	@$(IN_VENV) -m pip install -qq --no-deps --target $(VENV)/frameworks/site-packages accelerate==1.15.0 \
	  lightning-fabric==2.6.6 lightning-utilities==0.15.3 peft==0.21.2 transformers==5.23.0 \
	  huggingface-hub==2.4.0 tokenizers==0.23.3 safetensors==0.8.0 psutil==7.2.2 pyyaml==6.0.3 \
	  regex==2026.11.15 tqdm==4.70.1 fsspec==2026.9.0 filelock==4.2.11 httpx2==2.16.2 httpcore2==2.16.2 \
	  truststore==0.10.5 anyio==4.16.0 idna==3.20 h11==0.16.0 certifi==2026.10.18
	@touch $@

# The oldest releases that `forge.integrations.transformers` and `.accelerate` support.
$(VENV)/.frameworks_oldest-installed: $(VENV)/.frameworks-installed
	@rm -rf $(VENV)/frameworks_oldest && cp -r $(VENV)/frameworks $(VENV)/frameworks_oldest
	@cd $(VENV)/frameworks_oldest/site-packages && rm -rf transformers* accelerate* huggingface_hub* tokenizers* peft*
	@$(IN_VENV) -m pip install -qq --no-deps --target $(VENV)/frameworks_oldest/site-packages \
	  transformers==5.3.0 accelerate==1.10.0 huggingface-hub==1.3.0 tokenizers==0.22.0 peft==0.18.0 \
	  typer==0.20.0 shellingham==1.5.4 click==8.3.0 httpx==0.28.1 httpcore==1.0.9 hf-xet==1.2.0
	@touch $@

# The packages of `forge.loggers`, for its proofs; protobuf and what else tensorboard needs are there.
$(VENV)/.loggers-installed: $(VENV)/.dev-installed
	@$(IN_VENV) -m pip install -qq --no-deps --target $(VENV)/loggers wandb==0.31.0 \
	  mlflow-skinny==3.17.2 annotated-doc==0.0.7 annotated-types==0.8.0 anyio==4.16.0 cachetools==7.3.3 \
	  click==8.5.1 databricks-sdk==0.162.0 fastapi==0.165.0 gitdb==4.0.12 gitpython==3.2.1 idna==3.20 \
	  importlib-metadata==9.1.0 opentelemetry-api==1.45.2 opentelemetry-proto==1.45.2 \
	  opentelemetry-sdk==1.45.2 opentelemetry-semantic-conventions==0.66b2 pydantic==2.14.4 \
	  pydantic-core==2.50.5 python-dotenv==1.2.4 smmap==5.0.3 sqlparse==0.6.1 starlette==1.10.0 \
	  typing-inspection==0.4.5 zipp==4.1.2
	@touch $@

# Hydra's Optuna sweeper with the release of Optuna that it needs, and the current one.
$(VENV)/.optuna-installed: $(VENV)/.dev-installed
	@$(IN_VENV) -m pip install -qq --no-deps --target $(VENV)/sweepers hydra-optuna-sweeper==1.3.0 \
	  optuna==2.10.1 sqlalchemy==1.4.54 alembic==1.12.1 greenlet==3.5.6 cmaes==0.13.1 scipy==1.17.1 \
	  colorlog==6.12.0 mako==1.4.3 tqdm==4.70.1
	@$(IN_VENV) -m pip install -qq --no-deps --target $(VENV)/optuna optuna==5.0.0 sqlalchemy==2.1.9 \
	  alembic==1.20.1 colorlog==6.12.0 mako==1.4.3 tqdm==4.70.1
	@touch $@

# TRL, for `huggingface.py`.
$(VENV)/.trl-installed: $(VENV)/.dev-installed
	@$(IN_VENV) -m pip install -qq --no-deps --target $(VENV)/trl/site-packages trl==1.16.0 \
	  datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 pandas==3.1.1 pyarrow==26.0.1 python-dateutil \
	  pytz six tzdata
	@touch $@

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "forge needs Python 3.10 or newer, and $(PYTHON) is not. Try: make PYTHON=python3.11 ..."; \
	  exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' || { \
	  echo "$(PYTHON) cannot make environments. On Debian and Ubuntu: apt-get install python3-venv"; \
	  exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	@touch $@
