# Names for what the scripts do; read those for the options.
.PHONY: serve ask stop test fast lint

serve ask: ; @./scripts/quickstart.sh
stop: ; @./scripts/quickstart.sh --stop
test: ; @./scripts/test.sh
fast: ; @./scripts/test.sh --fast
lint: ; @./scripts/test.sh --lint
