//! The smallest agent: one call of the model.

use gym_server::prelude::*;

struct OneTurn(ServerClient);

impl AgentServer for OneTurn {
    async fn run(&self, cx: &CallContext, _: &SessionId, row: &RawObject) -> Result<Response> {
        let mut episode = Episode::seed(cx, &self.0, "math", row).await?;
        let answer =
            episode.ask("policy_model", row.get_object("responses_create_params")?.unwrap_or_default()).await?;
        episode.verify(answer).await
    }
}

fn main() -> std::process::ExitCode {
    cli::main(gym_examples::servers::servers().agent("one_turn", |build| Ok(OneTurn(build.client.clone()))))
}
