// Publishes numbers with MQTT.js: node fill.js URL VERSION COUNT PROPERTY VALUE TOPIC0 TOPIC1 TOPIC2, to each topic at its QoS.
// Ends once all are answered.
'use strict'

const mqtt = require('mqtt')

const [url, version, count, name, value, ...topics] = process.argv.slice(2)

async function main () {
  const client = await mqtt.connectAsync(url, { protocolVersion: Number(version), clientId: 'mqttjs', reconnectPeriod: 0 })
  const properties = version === '5' ? { userProperties: { [name]: value } } : undefined
  const numbers = Array.from({ length: Number(count) }, (_, number) => String(number))
  for (const [qos, topic] of topics.entries()) {
    await Promise.all(numbers.map(number => client.publishAsync(topic, number, { qos, properties })))
  }
  await client.endAsync()
}

main().catch(error => {
  console.error(error)
  process.exit(1)
})
